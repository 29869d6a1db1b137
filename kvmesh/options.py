"""Makes command-line options from declared settings (`kvmesh.settings`). Imports nothing heavy.

A command names its settings as parameters, and gets checked values:

    @app.command("extproc")
    @takes_settings
    def run_picker(settings: PickerSettings) -> None: ...
"""

import inspect
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import Field, is_dataclass
from functools import wraps
from typing import Annotated, Any

import typer

from kvmesh.errors import SettingError
from kvmesh.settings import OWN, Group, Setting, declarations

log = logging.getLogger(__name__)

Command = Callable[..., None]
CONFIG = "config"  # key of the settings file in the context of the command line


def takes_settings(command: Command) -> Command:
    """Give a command the options of the settings classes among its parameters, after its own options.

    A SettingError of a class's constructor, or of its optional method `require_usable`, is reported as wrong usage.
    Errors from reading a single option pass through.
    """
    own = inspect.signature(command).parameters.values()
    settings = [each for each in own if isinstance(each.annotation, type) and is_dataclass(each.annotation)]
    held = {each.name: Group(holds=each.annotation) for each in settings}
    shown = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in own if each.name not in held]
    shown += [option for group in held.values() for option in _parameters(group)]

    @wraps(command)
    def run(**given: Any) -> None:
        values = {name: _value(group, given) for name, group in held.items()}
        command(**values, **given)

    run.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in shown}
    return run


def _parameters(group: Group) -> Iterator[inspect.Parameter]:
    for field, mark in declarations(group):
        if isinstance(mark, Group):
            yield from _parameters(mark)
        else:
            yield inspect.Parameter(
                mark.flag,
                inspect.Parameter.KEYWORD_ONLY,
                default=_default(field, mark),
                annotation=Annotated[field.type if mark.given is OWN else mark.given, _option(mark)],
            )


def _default(field: Field[Any], setting: Setting) -> Any:
    if setting.shown is not OWN:
        return setting.shown
    return field.default if setting.write is None else setting.write(field.default)


def _option(setting: Setting) -> Any:
    return typer.Option(
        *(() if setting.switch is None else (setting.switch,)),
        help=setting.help,
        metavar=setting.metavar,
        min=setting.least,
        max=setting.most,
        exists=setting.must_exist,
        file_okay=setting.is_folder is not True,
        dir_okay=setting.is_folder is not False,
    )


def _value(group: Group, given: dict[str, Any]) -> Any:
    """Take the options of a class out of `given`, and return its value."""
    values: dict[str, Any] = {}
    for field, mark in declarations(group):
        if isinstance(mark, Group):
            values[field.name] = _value(mark, given)
            continue
        value = given.pop(mark.flag)
        if value is not None and mark.read is not None:
            value = mark.read(value)
        elif value is None and mark.given is not OWN:
            value = mark.absent
        if value is not OWN:
            values[field.name] = value
        if mark.warn is not None:
            _warn_of_flag(value, mark.warn)
    try:
        made = group.holds(**values)
        if hasattr(made, "require_usable"):
            made.require_usable()
    except SettingError as error:
        raise typer.BadParameter(str(error)) from None
    return made


def _warn_of_flag(value: Any, warn: Callable[[str], str | None]) -> None:
    """Log the warning if the value came as a flag: every user of the machine can read the flags of a process."""
    if isinstance(value, str) and any(value in argument for argument in sys.argv) and (warning := warn(value)):
        log.warning(warning)


def fails_in_one_line(name: str, codes: Mapping[type[Exception], int]) -> Callable[[Command], Command]:
    """Make the command `kvmesh NAME` print these errors as one line that names it, and end with their exit codes.

    Stands above `takes_settings`, to catch the errors of reading options, too. The first class that fits an error
    counts.
    """

    def decorate(command: Command) -> Command:
        @wraps(command)
        def run(**given: Any) -> None:
            try:
                command(**given)
            except tuple(codes) as error:
                typer.echo(f"kvmesh {name}: {error}", err=True)
                raise typer.Exit(next(code for kind, code in codes.items() if isinstance(error, kind))) from None

        return run

    return decorate
