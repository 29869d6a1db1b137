"""What the picker and the indexer share: block keys, the index's schema, Redis, documents, admin access."""

from functools import cache


@cache
def release() -> str:
    """Return the version of kvmesh; looked up on demand, because finding it costs a start about 20 ms."""
    from importlib.metadata import version  # noqa: PLC0415

    return version("kvmesh")


def __getattr__(name: str) -> str:
    if name == "__version__":
        return release()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
