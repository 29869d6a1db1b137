"""Judges a running picker: ready, serving gRPC, set up for the same endpoints."""

from collections.abc import Iterator

from extproc.doctor.facts import SERVING, Facts
from extproc.doctor.findings import Finding, error, unchecked


def picker_answers(facts: Facts) -> Iterator[Finding]:
    """The running picker is ready, serves gRPC and reads the index."""
    picker = facts.picker
    if picker is None:
        return
    if picker.problem:
        yield unchecked(
            picker.url, picker.problem, fix="check the URL given as --picker (its --host and --admin-port) and its log"
        )
        return
    if not picker.ready:
        yield error(picker.url, "is not ready", fix="see /readyz there and its log; it is starting or stopping")
    if picker.grpc_health != SERVING:
        yield error(
            picker.grpc_address,
            f"its gRPC health is {picker.grpc_health}",
            fix="give this command the picker's --grpc-port; see that nothing else has that port and that it listens "
            "where Envoy reaches it (--host)",
        )
    if picker.index_problem:
        yield error(
            picker.url,
            f"its index: {picker.index_problem}",
            fix="compare its --redis with this command's, and see that an indexer runs",
        )


def picker_endpoints(facts: Facts) -> Iterator[Finding]:
    """The running picker knows the same endpoints."""
    picker = facts.picker
    if picker is None or picker.problem:
        return
    expected = frozenset(facts.expected.endpoints)
    if expected != picker.endpoints:
        missing, further = sorted(expected - picker.endpoints), sorted(picker.endpoints - expected)
        parts = [f"does not know {', '.join(missing)}"] if missing else []
        parts += [f"also has {', '.join(further)}"] if further else []
        yield error(
            picker.url,
            " and ".join(parts),
            fix="give the running picker and this command the same --endpoints",
        )
