"""Access to the admin pages, as options: of the roles that serve them, and of the commands that ask them.

Beside `redis_options` the module that other packages' commands may import; imports nothing heavy.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from kvmesh.admin.admin_access import AdminAccess
    from kvmesh.admin.admin_login import AdminLogin

AdminTokenFile = Annotated[
    Path | None,
    typer.Option(
        help="File with the tokens (one a line, at least 16 bytes) that open the admin pages; read anew when it "
        "changes. Default: none, and the pages are open on loopback and closed elsewhere."
    ),
]
Options = Mapping[str, tuple[str, Any]]  # option -> the field of the value it is for, its annotation

ACCESS: Options = {
    "admin_token_file": ("token_file", AdminTokenFile),
    "admin_tls_cert": (
        "tls_cert",
        Annotated[
            Path | None,
            typer.Option(help="PEM file with the certificate of the admin pages; read anew when it changes."),
        ],
    ),
    "admin_tls_key": (
        "tls_key",
        Annotated[
            Path | None, typer.Option(help="PEM file with the key of --admin-tls-cert. Default: it is in that file.")
        ],
    ),
    "admin_client_ca": (
        "client_ca",
        Annotated[
            Path | None,
            typer.Option(help="PEM file with the authorities whose client certificates open the admin pages."),
        ],
    ),
}
LOGIN: Options = {
    "token_file": (
        "token_file",
        Annotated[Path | None, typer.Option(help="File with the token for the admin pages; its first line counts.")],
    ),
    "ca": (
        "ca_file",
        Annotated[
            Path | None,
            typer.Option(help="PEM file with the authorities of the admin pages' certificate. Default: the system's."),
        ],
    ),
    "cert": (
        "cert_file",
        Annotated[Path | None, typer.Option(help="PEM file with the certificate that the admin pages are shown.")],
    ),
    "key": (
        "key_file",
        Annotated[Path | None, typer.Option(help="PEM file with the key of --cert. Default: it is in that file.")],
    ),
}


def with_admin_access(command: Callable[..., None]) -> Callable[..., None]:
    """Give a role the options that say who may see its admin pages, and hand it them as `admin`: an AdminAccess."""
    return _with(command, "admin", ACCESS, _access)


def with_admin_login(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options that say what it shows admin pages, and hand it them as `login`: an AdminLogin.

    Files that cannot be used are wrong usage, before anybody is asked.
    """
    return _with(command, "login", LOGIN, _login)


def _access(fields: Mapping[str, Path | None]) -> "AdminAccess":
    from kvmesh.admin.admin_access import AdminAccess

    return AdminAccess(**fields)


def _login(fields: Mapping[str, Path | None]) -> "AdminLogin":
    from kvmesh.admin.admin_login import AdminLogin

    login = AdminLogin(**fields)
    if any(fields.values()):
        login.headers()
        login.tls()
    return login


def _with(
    command: Callable[..., None], name: str, options: Options, make: Callable[[Mapping[str, Path | None]], object]
) -> Callable[..., None]:
    @wraps(command)
    def run(*positional: Any, **values: Any) -> None:  # what a decorator above this one has made comes by position
        from kvmesh.errors import SettingError

        fields = {field: values.pop(option) for option, (field, _) in options.items()}
        try:
            value = make(fields)
        except SettingError as error:
            raise typer.BadParameter(str(error)) from None
        command(*positional, **values, **{name: value})

    kind = inspect.Parameter.KEYWORD_ONLY
    own = [each.replace(kind=kind) for each in inspect.signature(command).parameters.values() if each.name != name]
    added = [
        inspect.Parameter(option, kind, annotation=annotation, default=None)
        for option, (_, annotation) in options.items()
    ]
    run.__signature__ = inspect.Signature([*own, *added])  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in (*own, *added)}
    return run
