"""What people write for a pool, the same wherever a command takes one. Pure."""

from collections.abc import Sequence


def pool_name(text: str) -> str:
    """Return "namespace/name" of `NAMESPACE/NAME[:PORT[:PODPORT]]`: the ports are for `kvmesh install` alone.

    One settings file serves all commands, so that what installs a pool also names it. Raise ValueError.
    """
    name = text.strip().partition(":")[0]
    namespace, slash, short = name.partition("/")
    if not slash or not namespace or not short or "/" in short:
        raise ValueError(f"{text[:200]!r} is not NAMESPACE/NAME")
    return name


def only_pool(texts: Sequence[str] | None) -> str | None:
    """Return the pool of a command that is about one; None where none is named. Raise ValueError."""
    names = list(dict.fromkeys(map(pool_name, texts or ())))
    if len(names) > 1:
        raise ValueError(f"{len(names)} pools are named ({', '.join(names[:4])}): give the one that this is about")
    return names[0] if names else None
