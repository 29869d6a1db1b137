"""Options that several commands share."""

from collections.abc import Sequence
from typing import Annotated

import typer

from extproc.errors import ConfigError
from extproc.pools.pool_hosts import pool_name

PickerUrl = Annotated[str, typer.Option(metavar="URL", help="Admin address of a running picker.")]
DEFAULT_PICKER = "http://127.0.0.1:9090"
RootNamespace = Annotated[str, typer.Option(help="Namespace whose policies without targetRefs are mesh-wide.")]


def only_pool(texts: Sequence[str] | None) -> str | None:
    """Return the pool for a command about a single pool, or None if none is named. Raise ConfigError."""
    try:
        names = list(dict.fromkeys(map(pool_name, texts or ())))
    except ValueError as error:
        raise ConfigError(f"--pool: {error}") from error
    if len(names) > 1:
        raise ConfigError(f"--pool: {len(names)} pools are named ({', '.join(names[:4])}): name one")
    return names[0] if names else None
