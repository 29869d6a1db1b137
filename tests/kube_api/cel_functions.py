"""The functions that Kubernetes adds to CEL, for `cel_rules`: strings, lists, regular expressions, IPs, quantities."""

import ipaddress
import re
from collections.abc import Callable, Sequence
from decimal import Decimal
from itertools import pairwise
from typing import Any
from urllib.parse import urlsplit

_SUFFIXES = {
    "": Decimal(1),
    "m": Decimal("0.001"),
    **{unit: Decimal(1000) ** power for power, unit in enumerate("kMGTPE", 1)},
    **{f"{unit}i": Decimal(1024) ** power for power, unit in enumerate("KMGTPE", 1)},
}
_QUANTITY = re.compile(r"^([+-]?(?:\d+(?:\.\d*)?|\.\d+))(m|[kMGTPE]|[KMGTPE]i|)$")


def quantity(text: str) -> float:
    """A quantity such as 1500m or 2Gi as a plain number: comparisons are what rules need."""
    found = _QUANTITY.match(text)
    if not found:
        raise ValueError(f"quantities must match the regular expression {_QUANTITY.pattern!r}")
    return float(Decimal(found[1]) * _SUFFIXES[found[2]])


def _is(parse: Callable[[str], Any]) -> Callable[[str], bool]:
    def check(text: str) -> bool:
        try:
            parse(text)
        except ValueError:
            return False
        return True

    return check


def _url(text: str) -> str:
    parts = urlsplit(text)
    if not (parts.scheme or text.startswith("/")):
        raise ValueError(f"URL parse error during conversion from string: {text}")
    return text


def _split(text: str, separator: str, limit: int = -1) -> list[str]:
    if limit == 0:
        return []
    return (list(text) if not separator else text.split(separator, limit - 1 if limit > 0 else -1)) if text else [text]


def _substring(text: str, start: int, end: int | None = None) -> str:
    end = len(text) if end is None else end
    if not 0 <= start <= end <= len(text):
        raise ValueError(f"index out of range: {start}")
    return text[start:end]


def _index_of(where: Any, what: Any) -> int:
    return where.find(what) if isinstance(where, str) else where.index(what) if what in where else -1


def _last_index_of(where: Any, what: Any) -> int:
    if isinstance(where, str):
        return where.rfind(what)
    return max((index for index, one in enumerate(where) if one == what), default=-1)


def _format(text: str, values: Sequence[Any]) -> str:
    def plain(value: Any) -> str:
        return str(value).lower() if isinstance(value, bool) else str(value)

    remaining = iter(values)
    return re.sub(r"%(?:\.\d+)?[sdfexXob]", lambda found: plain(next(remaining)), text)


def _find(text: str, pattern: str) -> str:
    found = re.search(pattern, text)
    return found[0] if found else ""


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "charAt": lambda text, index: text[index : index + 1],
    "indexOf": _index_of,
    "lastIndexOf": _last_index_of,
    "lowerAscii": lambda text: text.lower(),
    "upperAscii": lambda text: text.upper(),
    "replace": lambda text, old, new, limit=-1: text.replace(old, new, limit),
    "split": _split,
    "substring": _substring,
    "trim": lambda text: text.strip(),
    "join": lambda parts, separator="": separator.join(parts),
    "reverse": lambda text: text[::-1],
    "format": _format,
    "find": _find,
    "findAll": lambda text, pattern, limit=-1: [one[0] for one in re.finditer(pattern, text)][
        : limit if limit >= 0 else None
    ],
    "isSorted": lambda values: all(one <= other for one, other in pairwise(values)),
    "sum": sum,
    "isURL": _is(_url),
    "url": _url,
    "getScheme": lambda text: urlsplit(text).scheme,
    "getHost": lambda text: urlsplit(text).netloc,
    "getHostname": lambda text: urlsplit(text).hostname or "",
    "getPort": lambda text: str(urlsplit(text).port or ""),
    "getEscapedPath": lambda text: urlsplit(text).path,
    "isIP": _is(ipaddress.ip_address),
    "isCIDR": _is(lambda text: ipaddress.ip_network(text, strict=False)),
    "isQuantity": _is(quantity),
    "quantity": quantity,
    "isGreaterThan": lambda one, other: one > other,
    "isLessThan": lambda one, other: one < other,
    "compareTo": lambda one, other: (one > other) - (one < other),
}
