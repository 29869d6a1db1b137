"""The units of time and memory that a chat template's render spends: without any left, it ends.

A unit is about a byte read or written: some nanoseconds at most. `template_limits` puts the spending into templates.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

from jinja2 import pass_context
from jinja2.runtime import Context
from jinja2.utils import Namespace

from extproc.errors import TemplateLimitError

NODE = 32  # units
ANY = 1 << 62
UNITS = 4_000_000  # of any render: some 10 ms
MORE_PER_UNIT = 64  # of the request, for long ones
MOST_BITS = 4096  # of a number
MOST_WIDTH = 1000
SORTING = 20  # comparisons of a value, at most
PIECES = 16  # of the text: their lengths are spent once they exist

_FORMATS, _SORTS, _REPEATS = ("format", "format_map"), ("sort", "dictsort"), ("join", "indent", "tojson")
_WIDENS = frozenset(("center", "ljust", "rjust", "zfill", "indent", "round", "tojson"))
SCALARS = frozenset((int, float, bool, type(None)))
_HOLDING: tuple[type[Any], ...] = (dict, list, tuple, set, type({}.keys()), type({}.values()), type({}.items()))
_WIDE_FORMAT = re.compile(r"\d{4}|\*|\{[^}]*\{")


class LimitedContext(Context):
    """The variables of one render, and the units it has left."""

    left = UNITS
    has_more = True  # units for the length of the request
    has_shared = False  # one list may be in another twice, as in no request

    def spend(self, units: int) -> None:
        """Take units; raise TemplateLimitError if there are not enough."""
        self.left -= units
        if self.left < 0:
            self._extend()

    def _extend(self) -> None:
        if self.has_more:
            self.has_more = False
            self.left += MORE_PER_UNIT * self.size(self.parent, most=ANY)
        if self.left < 0:
            raise breach()

    def size(self, value: Any, most: int | None = None) -> int:
        """Return the units of reading a value with all that is in it; raise TemplateLimitError above `most` or `left`.

        A list that is in others a thousand times counts as often: that is how it is written or compared.
        """
        total = 0
        stack: list[Any] = [value]
        while stack:
            if total > (self.left if most is None else most):
                self.left -= total
                self._extend()
                self.left += total
            each = stack.pop()
            total += NODE + (len(each) if isinstance(each, str) else 0)
            if type(each) is Namespace:
                each = object.__getattribute__(each, "_Namespace__attrs")
            if type(each) is range:
                total += NODE * len(each)
            elif isinstance(each, _HOLDING):
                total += NODE * len(each)
                stack.extend(each)
                if isinstance(each, dict):
                    stack.extend(each.values())
        return total

    def text(self, value: Any) -> str:
        """Return a value as the template's text."""
        if type(value) is str:
            return value
        if type(value) not in SCALARS:
            self.spend(self.size(value))
        return str(value)

    def concatenated(self, pieces: Iterable[str]) -> str:
        """Return the text of a template's, macro's or block's pieces."""
        found, rest = [], iter(pieces)
        while some := list(islice(rest, PIECES if self.has_more else PIECES // 4)):
            self.left -= sum(map(len, some))
            if self.left < 0:
                self.spend(0)
            found += some
        return "".join(found)

    def before(self, name: str, value: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Spend for a filter or method of a value that reads all of it."""
        given = (*args, *kwargs.values()) if kwargs else args
        if name in _FORMATS and given:
            self.formatted(value, given)
            return
        if type(value) is str:
            units = NODE + len(value)
        elif name == "tojson" and not self.has_shared:  # the text's length is spent afterwards
            units = NODE
        else:
            units = self.size(value)
        units *= SORTING if name in _SORTS else 1
        for arg in given:
            if isinstance(arg, str):
                if name == "replace":
                    units += len(arg) * str(value).count(str(given[0]))
                units = units * (1 + len(arg)) if name in _REPEATS else units + len(arg)
            elif type(arg) is int:
                units *= _times(arg) if name in _WIDENS else 1
            elif type(arg) not in SCALARS:
                self.has_shared = True
                units *= self.size(arg)
        self.spend(units)

    def after(self, result: Any) -> Any:
        """Spend for the result of a filter or method."""
        if isinstance(result, str):
            self.spend(len(result))
        elif type(result) is list:
            self.spend(NODE * len(result))
        return result

    def formatted(self, layout: Any, values: Any) -> None:
        """Spend for `layout % values` or `layout.format(values)`."""
        self.spend(self.size(layout))
        layout = str(layout)
        fields = layout.count("%") + layout.count("{")
        if _WIDE_FORMAT.search(layout):
            raise breach()
        self.spend(len(layout) + fields * (MOST_WIDTH + self.size(values)))

    def counted(self, items: Iterable[Any], units: int) -> Iterator[Any]:
        """Yield items, and spend for each."""
        for item in items:
            self.spend(units)
            yield item


def _times(width: int) -> int:
    if abs(width) > MOST_WIDTH:
        raise breach()
    return 1 + abs(width)


def breach() -> TemplateLimitError:
    """Return the error of a template that breaks its limits."""
    return TemplateLimitError("the chat template takes more time or memory than a template may")


# --- the nodes of a limited template ----------------------------------------------------------------------------------


@pass_context
def loop(context: LimitedContext, items: Any, units: int) -> Any:
    """Spend for a loop over items, and return them."""
    try:
        count = len(items)
    except TypeError:
        return context.counted(items, units)
    context.spend(units * count)
    return items


@pass_context
def _spend(context: LimitedContext, value: Any, units: int) -> Any:
    context.spend(units)
    return value


@pass_context
def _add(context: LimitedContext, total: Any, *others: Any) -> Any:
    for other in others:
        total = total + other
        if type(total) is str:
            context.left -= len(total)
            if context.left < 0:
                context.spend(0)
        elif isinstance(total, str | list | tuple):
            context.has_shared = True
            context.spend(NODE * len(total))
    return total


@pass_context
def _joined(context: LimitedContext, *values: Any) -> str:
    return context.concatenated([context.text(value) for value in values])


@pass_context
def _read(context: LimitedContext, value: Any) -> Any:
    if type(value) is str:
        context.spend(len(value))
    elif type(value) is not dict and type(value) not in SCALARS:
        context.spend(context.size(value))
    return value


@pass_context
def _read_all(context: LimitedContext, value: Any) -> Any:
    if type(value) not in SCALARS:
        context.spend(len(value) if type(value) is str else context.size(value))
    return value


@pass_context
def _key(_context: LimitedContext, value: Any) -> Any:
    if type(value) is not str and type(value) not in SCALARS:
        raise TypeError("a key must be a string or a number")  # any other may take long to hash
    return value


@pass_context
def _made(context: LimitedContext, value: Any) -> Any:
    context.has_shared = True
    return value


@pass_context
def _part(context: LimitedContext, value: Any) -> Any:
    return context.after(value)


NODES = {"loop": loop, "spend": _spend, "add": _add, "~": _joined, "read": _read, "all": _read_all}
NODES |= {"made": _made, "part": _part, "key": _key}
