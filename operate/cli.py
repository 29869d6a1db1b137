"""The command `kvmesh`: collects the packages' subcommands and gives all of them the same settings and logging.

A setting comes from its flag, else from the environment (`KVMESH_<FLAG>`), else from the YAML file of `--config`,
whose keys are the flags' names in one flat namespace shared by all commands. Subcommands know nothing of this.
"""

import difflib
import os
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from extproc.errors import ConfigError, KvmeshError
from extproc.settings.yaml_text import read_yaml
from kvmesh.errors import KvIndexerError, SettingError
from kvmesh.heap import collector_at_rest
from kvmesh.logs import LOG_FORMAT, LOG_LEVEL, LogFormat, LogLevel, configure_logging, tell_crashes_so
from kvmesh.options import CONFIG
from kvmesh.output.forms import Output, OutputForm, print_data
from kvmesh.output.standard_output import guard_standard_output

HELP = """Send LLM requests to the vLLM pod that already holds their prefix.

A setting comes from its flag, else from the environment (KVMESH_<FLAG>), else from the YAML file of --config, whose
keys are the flags' names in one flat namespace shared by all commands."""

ENVIRONMENT_PREFIX = "KVMESH_"
INTERRUPTED = 130  # the shell's exit code for SIGINT
# command -> module of its entry point, for roles whose restart after a crash must be fast: loading the commands of all
# packages would double the start-up time
ROLES = {"extproc": "extproc.cli", "indexer": "kv_indexer.cli"}
# servers, which must survive a closed standard output
SERVERS = frozenset({"extproc", "indexer", "sim"})
# set by test runners and caches, not by flags
OTHER_VARIABLES = frozenset({"KVMESH_CACHE", "KVMESH_REQUIRE_PROGRAMS", "KVMESH_TEST_REDIS_SERVER"})
# https://kubernetes.io/docs/concepts/services-networking/service/#environment-variables
SERVICE_LINK = re.compile(r"_SERVICE_(HOST|PORT(_\w+)?)$|_PORT_\d+_(TCP|UDP|SCTP)(_PROTO|_PORT|_ADDR)?$")


def main() -> None:
    """Run `kvmesh`; the exit code is 0, 1 for a failure (with one line of message), or 2 for wrong usage."""
    tell_crashes_so()
    prints = not SERVERS.intersection(sys.argv[1:2])
    if prints:
        guard_standard_output("kvmesh")
    try:
        with collector_at_rest():
            root = build(sys.argv[1:])
        root(prog_name="kvmesh")
    except (KvmeshError, KvIndexerError) as error:
        print(f"kvmesh: {error}", file=sys.stderr)  # noqa: T201
        sys.exit(2 if isinstance(error, ConfigError | SettingError) else 1)
    except KeyboardInterrupt:  # while the tree was being built; later each command handles it
        sys.exit(INTERRUPTED)
    finally:
        if prints and sys.stdout is not None:
            sys.stdout.flush()


def build(words: Sequence[str] = ()) -> Any:
    """Assemble the command tree from the entry points `kvmesh.commands`, so that no package imports another.

    If the command line begins with one of ROLES, only the commands of its package are loaded.
    """
    role = words[0] if words and words[0] in ROLES else None
    root = _tree(role)
    shared = _shared_options()
    commands = list(_leaves(root))
    for command in commands:
        command.context_settings["auto_envvar_prefix"] = ENVIRONMENT_PREFIX.rstrip("_")
        command.params.extend(shared)
    root.context_settings["help_option_names"] = ["-h", "--help"]  # inherited by all subcommands
    known = SettingNames(_names(commands), are_all=role is None)
    _refuse_unknown_variables(os.environ, known=known)
    root.context_settings["obj"] = known
    return root


class SettingNames:
    """The setting names of all commands, which share one namespace.

    Commands that are not loaded yet are loaded when an unknown name turns up.
    """

    def __init__(self, names: frozenset[str], *, are_all: bool) -> None:
        self._names = names
        self._are_all = are_all

    def __contains__(self, name: object) -> bool:
        return name in self._names or name in self.all()

    def all(self) -> frozenset[str]:
        """Return all names."""
        if not self._are_all:
            self._names, self._are_all = self._names | _names(_leaves(_tree(None))), True
        return self._names


def _tree(role: str | None) -> Any:
    app = typer.Typer(no_args_is_help=True, add_completion=role is None, help=HELP, rich_markup_mode=None)
    groups: dict[str, Any] = {}
    for package in [import_module(ROLES[role]).app] if role is not None else _packages():
        app.registered_commands.extend(package.registered_commands)
        for group in package.registered_groups:
            _add_group(app, groups, group)
    app.command("version")(print_version)
    app.callback()(_of_no_command)
    return typer.main.get_command(app)


def _packages() -> list[Any]:
    from importlib.metadata import entry_points

    return [entry.load() for entry in sorted(entry_points(group="kvmesh.commands"), key=lambda entry: entry.name)]


def _names(commands: Iterable[Any]) -> frozenset[str]:
    return frozenset(parameter.name for command in commands for parameter in command.params)


def _add_group(app: typer.Typer, groups: dict[str, Any], group: Any) -> None:
    """Add a group of commands; packages may share a group by its name, and the last help given is its help."""
    if group.name not in groups:
        inner = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None)
        app.add_typer(inner, name=group.name)
        groups[group.name] = app.registered_groups[-1]
    groups[group.name].help = group.help or groups[group.name].help
    groups[group.name].typer_instance.registered_commands.extend(group.typer_instance.registered_commands)


def _leaves(command: Any) -> Iterator[Any]:
    if not hasattr(command, "commands"):
        yield command
        return
    for inner in command.commands.values():
        yield from _leaves(inner)


def _of_no_command(
    version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=lambda asked: asked and _end_with_version(), help="As `version`."
        ),
    ] = False,
) -> None: ...


def _end_with_version() -> None:
    print_version()
    raise typer.Exit


def print_version(output: Output = OutputForm.TABLE) -> None:
    """Print the versions of kvmesh, Python and grpcio."""
    from importlib.metadata import version

    versions = {"kvmesh": version("kvmesh"), "python": sys.version.split()[0], "grpcio": version("grpcio")}
    if output is not OutputForm.TABLE:
        print_data(versions, output)
        return
    typer.echo("kvmesh {kvmesh} (Python {python}, grpcio {grpcio})".format(**versions))


def _shared_options() -> list[Any]:
    """Return the options of every command; their callbacks act at parse time, so commands do not receive them."""

    def template(
        config: Annotated[
            Path | None,
            typer.Option(
                exists=True,
                dir_okay=False,
                is_eager=True,
                expose_value=False,
                callback=_read_config_file,
                help="YAML file with settings: keys are the flags' names, dashes as underscores.",
            ),
        ] = None,
        log_format: Annotated[
            LogFormat, typer.Option(expose_value=False, callback=_keep_log_setting, help="How log lines are written.")
        ] = LogFormat.TEXT,
        log_level: Annotated[
            LogLevel,
            typer.Option(expose_value=False, callback=_keep_log_setting, help="Minimum severity of log lines."),
        ] = LogLevel.INFO,
    ) -> None: ...

    holder = typer.Typer(add_completion=False)
    holder.command()(template)
    return [option for option in typer.main.get_command(holder).params if option.name != "help"]


def _read_config_file(context: typer.Context, path: Path | None) -> Path | None:
    if path is None:
        return None
    try:
        settings = read_yaml(path.read_text(encoding="utf-8"), where=str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not readable as YAML: {error}") from error
    if settings is None:
        settings = {}
    if not isinstance(settings, Mapping):
        raise ConfigError(f"{path}: must be a mapping of settings, not a {type(settings).__name__}")
    known: SettingNames = context.find_root().obj
    for key in settings:
        if key not in known:
            raise ConfigError(f"{path}: unknown setting {key!r}{_nearest(str(key), known.all())}")
    context.meta[CONFIG] = path.resolve()  # passed on to the children of `kvmesh up`
    repeated = {option.name for option in context.command.params if getattr(option, "multiple", False)}
    context.default_map = {
        name: _flag_texts(value) if name in repeated else _flag_text(value) for name, value in settings.items()
    }
    return path


def _flag_texts(value: Any) -> list[Any]:
    return [_flag_text(item) for item in value] if isinstance(value, list) else [_flag_text(value)]


def _flag_text(value: Any) -> Any:
    """Convert a YAML list or mapping to the flag's syntax: `a,b`, `name=value,…`, or JSON if nested."""
    if isinstance(value, list) and not any(isinstance(item, list | dict) for item in value):
        return ",".join(str(item) for item in value)
    if isinstance(value, dict) and not any(isinstance(item, list | dict) for item in value.values()):
        return ",".join(f"{name}={item}" for name, item in value.items())
    return msgspec.json.encode(value).decode() if isinstance(value, list | dict) else value


def _refuse_unknown_variables(environment: Mapping[str, str], *, known: SettingNames) -> None:
    for variable, value in environment.items():
        if not variable.startswith(ENVIRONMENT_PREFIX) or variable in OTHER_VARIABLES:
            continue
        if _is_service_link(variable, value):
            continue
        name = variable.removeprefix(ENVIRONMENT_PREFIX)
        if name != name.upper() or name.lower() not in known:
            names = {f"{ENVIRONMENT_PREFIX}{each.upper()}" for each in known.all()} | OTHER_VARIABLES
            raise ConfigError(f"unknown environment variable {variable}{_nearest(variable, names)}")


def _is_service_link(variable: str, value: str) -> bool:
    """Tell whether Kubernetes set the variable, as it does in every pod for a Service named kvmesh or kvmesh-…"""
    return value.startswith(("tcp://", "udp://")) or SERVICE_LINK.search(variable) is not None


def _nearest(name: str, known: Collection[str]) -> str:
    close = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.0)
    return f"; the nearest valid one is {close[0]!r}" if close else ""


def _keep_log_setting(context: typer.Context, parameter: typer.CallbackParam, value: Any) -> Any:
    """Configure logging with the options parsed so far, because the two options may come in either order."""
    context.meta[parameter.name] = value
    configure_logging(
        level=context.meta.get(LOG_LEVEL, LogLevel.INFO), form=context.meta.get(LOG_FORMAT, LogFormat.TEXT)
    )
    return value
