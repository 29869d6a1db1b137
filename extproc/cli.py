"""The command `kvmesh`: gathers each package's subcommands and gives all of them the same settings and logging.

A setting comes from its flag, else from the environment (`KVMESH_<FLAG>`), else from the YAML file of `--config`,
whose keys are the flags' names in one flat namespace shared by all commands. Subcommands know nothing of this.
"""

import os
import re
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
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
from kvmesh.old_names import OldName, under_new_names
from kvmesh.output.forms import AsJson, Output, OutputForm, chosen_form, print_data
from kvmesh.output.standard_output import guard_standard_output
from kvmesh.plain_options import read_plainly

HELP = """Send LLM requests to the vLLM pod that already holds their prefix.

A setting comes from its flag, else from the environment (KVMESH_<FLAG>), else from the YAML file of --config, whose
keys are the flags' names in one flat namespace shared by all commands."""

ENVIRONMENT_PREFIX = "KVMESH_"
INTERRUPTED = 130  # as a shell has it for SIGINT
# command -> its module, as in its entry point, where a mesh waits for the process after a crash: to look for all
# packages and load their commands would take as long again
ROLES = {"extproc": "extproc.local.commands", "indexer": "kv_indexer.cli"}
# what serves: what becomes of its standard output must not end it
SERVERS = frozenset({"extproc", "indexer", "sim"})
# command -> its options that once had another name, which is still read: one thing has one name in all commands
OLD_NAMES: Mapping[str, Mapping[str, str]] = {
    "explain": {"picker": "url"},
    "plan": {"picker": "url"},
    "top": {"picker": "url"},
    "policy explain": {"picker": "url", "policies": "folder"},
    "indexer": {"policies": "pools"},
    "audit verify": {"audit_key_file": "key_file"},
    "audit read": {"access_log_stream": "stream"},
    "models fetch": {"tokenizers": "into"},
}
# set by test runners and caches, not by flags
OTHER_VARIABLES = frozenset({"KVMESH_CACHE", "KVMESH_REQUIRE_PROGRAMS", "KVMESH_TEST_REDIS_SERVER"})
# https://kubernetes.io/docs/concepts/services-networking/service/#environment-variables
SERVICE_LINK = re.compile(r"_SERVICE_(HOST|PORT(_\w+)?)$|_PORT_\d+_(TCP|UDP|SCTP)(_PROTO|_PORT|_ADDR)?$")


def main() -> None:
    """Run `kvmesh`; the exit code is 0, 1 for a failure with its one line, or 2 for wrong usage."""
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
    except KeyboardInterrupt:  # while it was being put together: later each command handles it
        sys.exit(INTERRUPTED)
    finally:
        if prints and sys.stdout is not None:
            sys.stdout.flush()


def build(words: Sequence[str] = ()) -> Any:
    """Assemble the command tree from the entry points `kvmesh.commands`, so that no package imports another.

    Where the words of the command line begin with one of ROLES, the commands of its package alone are loaded.
    """
    role = words[0] if words and words[0] in ROLES else None
    root = _tree(role)
    shared = _shared_options()
    named = _leaves(root)
    commands = list(named.values())
    for command in commands:
        command.context_settings["auto_envvar_prefix"] = ENVIRONMENT_PREFIX.rstrip("_")
        command.params.extend(shared)
    root.context_settings["help_option_names"] = ["-h", "--help"]  # and of all commands below it
    read_plainly(root, commands)
    for command_words, names in OLD_NAMES.items():
        for option in named[command_words].params if command_words in named else ():
            if option.name in names:
                OldName(option, name=names[option.name], prefix=ENVIRONMENT_PREFIX)
    known = SettingNames(_names(commands), are_all=role is None)
    _refuse_unknown_variables(os.environ, known=known)
    root.context_settings["obj"] = known
    return root


class SettingNames:
    """The names of all commands' settings, which share one namespace.

    Those of commands that were not loaded are looked up when a name turns up that the loaded ones do not have.
    """

    def __init__(self, names: frozenset[str], *, are_all: bool) -> None:
        self._names = names
        self._are_all = are_all

    def __contains__(self, name: object) -> bool:
        return name in self._names or name in self.all()

    def all(self) -> frozenset[str]:
        """Return all names."""
        if not self._are_all:
            self._names, self._are_all = self._names | _names(_leaves(_tree(None)).values()), True
        return self._names


def _tree(role: str | None) -> Any:
    """Return the commands, with a role those of its package alone."""
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
    once = frozenset(old for names in OLD_NAMES.values() for old in names.values())
    return once | frozenset(parameter.name for command in commands for parameter in command.params)


def _add_group(app: typer.Typer, groups: dict[str, Any], group: Any) -> None:
    """Add a group of commands; what several packages bring for a group of one name is one group, with the last help."""
    if group.name not in groups:
        inner = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None)
        app.add_typer(inner, name=group.name)
        groups[group.name] = app.registered_groups[-1]
    groups[group.name].help = group.help
    groups[group.name].typer_instance.registered_commands.extend(group.typer_instance.registered_commands)


def _leaves(command: Any, words: str = "") -> dict[str, Any]:
    """Return the commands that do something, at any depth, by the words that call them."""
    if not hasattr(command, "commands"):
        return {words: command}
    inner = (_leaves(each, f"{words} {name}".lstrip()) for name, each in command.commands.items())
    return {name: leaf for leaves in inner for name, leaf in leaves.items()}


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


def print_version(output: Output = OutputForm.TABLE, json: AsJson = False) -> None:
    """Print the version of kvmesh and of what it stands on."""
    from importlib.metadata import version

    versions = {"kvmesh": version("kvmesh"), "python": sys.version.split()[0], "grpcio": version("grpcio")}
    form = chosen_form(output, json=json)
    if form is not OutputForm.TABLE:
        print_data(versions, form)
        return
    typer.echo("kvmesh {kvmesh} (Python {python}, grpcio {grpcio})".format(**versions))


def _shared_options() -> list[Any]:
    """Options every command takes; their callbacks act at parse time, so that no command sees them."""

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
            LogFormat,
            typer.Option(expose_value=False, callback=_keep_log_setting, help="How log lines are written."),
        ] = LogFormat.TEXT,
        log_level: Annotated[
            LogLevel,
            typer.Option(expose_value=False, callback=_keep_log_setting, help="Least severity that is logged."),
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
    # children of `kvmesh up` read the same file
    os.environ[f"{ENVIRONMENT_PREFIX}CONFIG"] = str(path.resolve())
    repeated = {option.name for option in context.command.params if getattr(option, "multiple", False)}
    named = under_new_names(settings, context.command)
    context.default_map = {
        name: _flag_texts(value) if name in repeated else _flag_text(value) for name, value in named.items()
    }
    return path


def _flag_texts(value: Any) -> list[Any]:
    """Write a value, or each of a YAML list, as one of a flag that may be repeated."""
    return [_flag_text(item) for item in value] if isinstance(value, list) else [_flag_text(value)]


def _flag_text(value: Any) -> Any:
    """Write a YAML list or mapping as the flag takes it: `a,b`, `name=value,…`, or JSON where it is nested."""
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
    """Tell whether Kubernetes set the variable: it does so in every pod for a Service called kvmesh or kvmesh-…"""
    return value.startswith(("tcp://", "udp://")) or SERVICE_LINK.search(variable) is not None


def _nearest(name: str, known: Collection[str]) -> str:
    import difflib

    close = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.0)
    return f"; the nearest valid one is {close[0]!r}" if close else ""


def _keep_log_setting(context: typer.Context, parameter: typer.CallbackParam, value: Any) -> Any:
    """Configure logging with what is known so far: which of the two options comes first is up to the user."""
    context.meta[parameter.name] = value
    configure_logging(
        level=context.meta.get(LOG_LEVEL, LogLevel.INFO), form=context.meta.get(LOG_FORMAT, LogFormat.TEXT)
    )
    return value
