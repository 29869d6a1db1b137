"""What `kvmesh policy check` prints: a line for each remark, as compilers have them, and the custom resources."""

from collections.abc import Iterable, Iterator

from extproc.policy.check import ERROR, Checked, Remark
from extproc.policy.inference_policy import KIND
from extproc.policy.resource import resource_text
from kvmesh.plain_text import printable


def check_lines(found: Iterable[Checked]) -> Iterator[str]:
    """Yield `FILE:LINE: DOCUMENT: …`, for documents without an error beginning with `ok`."""
    nothing = True
    for checked in found:
        nothing = False
        if checked.name and not checked.is_wrong:
            yield _line(checked, checked.line, "ok")
        for remark in checked.remarks:
            yield _line(checked, remark.line, f"{_word(remark)} {remark.message}")
    if nothing:
        yield "no policies in these files"


def _word(remark: Remark) -> str:
    return remark.level.upper() if remark.level == ERROR else remark.level


def _line(checked: Checked, line: int, words: str) -> str:
    place = f"{checked.file}:{line}" if line else checked.file
    return printable(": ".join(part for part in (place, checked.name, words) if part))


def check_resources(found: Iterable[Checked]) -> str:
    """Return the policies without an error as custom resources in YAML."""
    texts = []
    for checked in found:
        document = checked.document
        if document is None or document["kind"] != KIND or checked.is_wrong:
            continue
        metadata = document["metadata"]
        texts.append(
            resource_text(
                document.get("spec") or {},
                name=metadata["name"],
                namespace=metadata.get("namespace", ""),
                head=[f"from {checked.file}, line {checked.line}"],
            )
        )
    return "---\n".join(texts)
