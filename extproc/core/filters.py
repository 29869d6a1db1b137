"""Filters: which endpoints may serve a request at all. Each returns None to keep a candidate or a few words why not."""

from collections.abc import Callable, Mapping

from extproc.core.endpoint import Candidate, Reachability


def ready(candidate: Candidate) -> str | None:
    """Keep endpoints that somebody listens on; unknown load is no reason to drop one."""
    return "unreachable" if candidate.reachability is Reachability.UNREACHABLE else None


FILTERS: Mapping[str, Callable[[Candidate], str | None]] = {"ready": ready}
