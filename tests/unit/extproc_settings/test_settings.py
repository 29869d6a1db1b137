"""Flags beat the environment, the environment beats the file, and unknown names are refused by name."""

import asyncio
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from extproc import service
from extproc.errors import ConfigError
from extproc.pods.endpoint import Role
from extproc.settings.config import PickerSettings, parse_endpoints
from operate import cli

PODS = "127.0.0.1:8101,[::1]:8102"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., PickerSettings]:
    """Run `kvmesh extproc …` up to the point where it would serve, and return its settings."""
    seen: list[PickerSettings] = []

    async def serve(settings: PickerSettings, *, stop: asyncio.Event) -> None:
        seen.append(settings)

    monkeypatch.setattr(service, "serve", serve)

    def command(*arguments: str) -> PickerSettings:
        root: Any = cli.build(["extproc"])
        root(["extproc", *arguments], prog_name="kvmesh", standalone_mode=False)
        return seen.pop()

    return command


def config(tmp_path: Path, text: str) -> str:
    path = tmp_path / "kvmesh.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_a_flag_beats_the_environment_and_the_file(
    run: Callable[..., PickerSettings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = config(tmp_path, "index_timeout_ms: 5\nscrape_interval_ms: 50\ngrpc_port: 1111\n")
    monkeypatch.setenv("KVMESH_SCRAPE_INTERVAL_MS", "60")
    monkeypatch.setenv("KVMESH_GRPC_PORT", "2222")
    settings = run("--config", path, "--endpoints", PODS, "--grpc-port", "3333")
    assert (settings.index_timeout_seconds, settings.scrape_interval_seconds, settings.grpc_port) == (0.005, 0.06, 3333)


def test_lists_and_mappings_may_be_written_as_yaml(run: Callable[..., PickerSettings], tmp_path: Path) -> None:
    text = "endpoints: ['127.0.0.1:1', '[::1]:2']\nroles: {'127.0.0.1:1': decode}\ncordoned: ['[::1]:2']\n"
    settings = run("--config", config(tmp_path, text))
    assert settings.endpoints == ("127.0.0.1:1", "[::1]:2")
    assert settings.policy.roles == {"127.0.0.1:1": Role.DECODE}
    assert settings.policy.cordoned == {"[::1]:2"}


def test_a_key_of_another_command_is_not_an_error(run: Callable[..., PickerSettings], tmp_path: Path) -> None:
    assert run("--config", config(tmp_path, "indexer_admin_port: 9\n"), "--endpoints", PODS).endpoints


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("indx_timeout_ms: 5\n", "unknown setting 'indx_timeout_ms'; the nearest valid one is 'index_timeout_ms'"),
        ("- a\n", "must be a mapping"),
        ("a: [\n", "not readable as YAML"),
    ],
)
def test_a_bad_file_is_refused_with_its_mistake(
    run: Callable[..., PickerSettings], tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        run("--config", config(tmp_path, text), "--endpoints", PODS)


@pytest.mark.parametrize(
    "line",
    [
        "pod_key_file: @secret7741",
        "redis: *secret7741",
        "redis: !secret7741 x",
        "redis: redis://:secret7741: x@127.0.0.1",
        'redis: "redis://:secret7741@127.0.0.1',
        "redis: &secret7741 &secret7741 x",
        "redis: %secret7741",
    ],
)
def test_a_mistake_in_a_line_is_told_without_the_line(
    run: Callable[..., PickerSettings], tmp_path: Path, line: str
) -> None:
    with pytest.raises(ConfigError, match=r"not readable as YAML: line \d+, column \d+: ") as refused:
        run("--config", config(tmp_path, f"{line}\n"), "--endpoints", PODS)
    assert "secret7741" not in str(refused.value)


def test_an_unknown_variable_is_refused_with_the_nearest_one(
    run: Callable[..., PickerSettings], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVMESH_GRCP_PORT", "1")
    with pytest.raises(ConfigError, match="KVMESH_GRCP_PORT; the nearest valid one is 'KVMESH_GRPC_PORT'"):
        run("--endpoints", PODS)


def test_a_variable_of_another_command_is_not_an_error(
    run: Callable[..., PickerSettings], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVMESH_INDEXER_ADMIN_PORT", "9")
    assert run("--endpoints", PODS).endpoints


@pytest.mark.parametrize("role", cli.ROLES)
def test_a_role_that_is_loaded_alone_is_the_one_of_the_whole_tree(role: str) -> None:
    alone, whole = (
        [(each.name, each.opts, each.help) for each in tree.commands[role].params]
        for tree in (cli.build([role]), cli.build())
    )
    assert alone == whole


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("KVMESH_SERVICE_HOST", "10.0.0.7"),
        ("KVMESH_REDIS_SERVICE_PORT_METRICS", "9121"),
        ("KVMESH_PORT", "tcp://10.0.0.7:80"),
        ("KVMESH_PICKER_PORT_9002_TCP_ADDR", "10.0.0.7"),
    ],
)
def test_what_kubernetes_sets_for_a_service_of_our_name_is_no_mistake(
    run: Callable[..., PickerSettings], monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    assert run("--endpoints", PODS).endpoints


@pytest.mark.parametrize(
    "flags", [("--log-format", "json", "--log-level", "warning")] * 2, ids=["format-first", "level-first"]
)
def test_logging_is_configured_whichever_option_comes_first(
    run: Callable[..., PickerSettings],
    capsys: pytest.CaptureFixture[str],
    flags: tuple[str, ...],
    request: pytest.FixtureRequest,
) -> None:
    ordered = flags if request.node.callspec.id == "format-first" else (*flags[2:], *flags[:2])
    run("--endpoints", PODS, *ordered)
    logging.getLogger("kvmesh.test").info("not this")
    logging.getLogger("kvmesh.test").warning("this", extra={"pod": "a"})
    (line,) = capsys.readouterr().err.splitlines()
    facts = json.loads(line)
    assert (facts["level"], facts["message"], facts["pod"]) == ("warning", "this", "a")


def test_a_tokenizer_without_its_model_is_refused(run: Callable[..., PickerSettings]) -> None:
    with pytest.raises(ConfigError, match="--tokenizer is given without --model"):
        run("--endpoints", PODS, "--tokenizer", ".")


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("--cordoned", "127.0.0.1", "--cordoned: '127.0.0.1' is none of --endpoints"),
        ("--roles", "[::1]:8103=prefill", "--roles: .* is none of --endpoints"),
        ("--roles", "127.0.0.1:8001=cook", "'127.0.0.1:8001=cook' is not IP:PORT=ROLE; roles are both, prefill, dec"),
        ("--roles", "prefill", "--roles: 'prefill' is not IP:PORT=ROLE"),
    ],
)
def test_a_cordon_or_role_that_cannot_be_meant_is_refused(
    run: Callable[..., PickerSettings], flag: str, value: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        run("--endpoints", PODS, flag, value)


def test_single_endpoints_may_be_cordoned_and_have_roles(run: Callable[..., PickerSettings], tmp_path: Path) -> None:
    first, second = PODS.split(",")[:2]
    flags = ("--cordoned", first, "--roles", f"{first}=decode,{second}=prefill")
    file = config(tmp_path, f'cordoned: ["{first}"]\nroles: {{"{first}": decode, "{second}": prefill}}\n')
    for arguments in (flags, ("--config", file)):
        policy = run(*arguments, "--endpoints", PODS).policy
        assert (policy.cordoned, policy.roles) == (
            frozenset({first}),
            {first: Role.DECODE, second: Role.PREFILL},
        )


def test_a_long_flat_policy_is_not_taken_for_a_file_s_name(run: Callable[..., PickerSettings]) -> None:
    long = ",".join(["failureMode=FailOpen"] * 20)
    assert run("--endpoints", PODS, "--policy", long).policy_fields == {"failureMode": "FailOpen"}


@pytest.mark.parametrize(
    "text",
    [
        "localhost",
        "localhost:80",
        "1.2.3.4",
        "1.2.3.4:0",
        "1.2.3.4:65536",
        "::1:80",
        "[1.2.3.4]:1",
        ":80",
        "1.2.3.4:b",
        "1.2.3.4:\N{SUPERSCRIPT TWO}",
        "1.2.3.4:1,1.2.3.4:1",
    ],
)
def test_a_bad_endpoint_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="endpoint"):
        parse_endpoints(text)


@pytest.mark.parametrize("command", ["extproc", "indexer", "sim", "up", "explain", "version"])
def test_every_command_has_help_and_the_shared_options(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    root: Any = cli.build()
    root([command, "--help"], prog_name="kvmesh", standalone_mode=False)
    text = capsys.readouterr().out
    assert all(flag in text for flag in ("--config", "--log-format", "--log-level", "KVMESH_CONFIG"))


def test_an_error_of_the_foundation_is_one_line_of_the_root_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "tell_crashes_so", lambda: None)
    monkeypatch.setattr("sys.argv", ["kvmesh", "audit", "read", "--redis", "foo", "--stream", "x"])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert (end.value.code, capsys.readouterr().err.startswith("kvmesh: Redis address 'foo': ")) == (2, True)


@pytest.mark.parametrize(
    "text",
    [
        "policy: {scoring: {strategy: least-request}}\n",
        "policy:\n  scoring: {strategy: least-request}\n  load: {health: {avoidSeconds: 3}}\n",
        'policy: \'{"scoring": {"strategy": "least-request"}}\'\n',
    ],
)
def test_the_policy_may_stand_in_the_configuration_file(
    run: Callable[..., PickerSettings], tmp_path: Path, text: str
) -> None:
    settings = run("--config", config(tmp_path, text), "--endpoints", PODS)
    assert settings.policy.weights == {"active-requests": 1.0}


def test_a_smaller_model_that_would_be_answered_404_is_refused(run: Callable[..., PickerSettings]) -> None:
    def policy(name: str, *, only_listed: bool = True) -> str:
        step = {"step": "smaller-model", "enter": 2, "leave": 1, "model": name}
        models = {"onlyListed": only_listed, "served": [{"name": "big"}, {"name": "small"}]}
        return json.dumps({"models": models, "priorities": {"classes": [{"name": "standard", "degrade": [step]}]}})

    assert run("--endpoints", PODS, "--policy", policy("small")).policy
    assert run("--endpoints", PODS, "--policy", policy("smal", only_listed=False)).policy
    with pytest.raises(ConfigError, match=r"classes\[standard\].degrade\[0\].model: 'smal' is not in spec.models"):
        run("--endpoints", PODS, "--policy", policy("smal"))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--policy", "priorities: {clases: {}}"), "--policy: spec.priorities.clases: unknown field"),
        (("--policy", "no-such-file.yaml"), "--policy: cannot read no-such-file.yaml"),
        (("--policy", '{"scoring": {"weights": {"prefx": 1}}}'), "--policy: spec.scoring.weights.prefx: unknown field"),
        (("--policy", "{"), "--policy: not readable as YAML"),
    ],
)
def test_a_policy_that_cannot_be_read_is_refused(
    run: Callable[..., PickerSettings], flags: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        run("--endpoints", PODS, *flags)


def test_the_model_of_the_flags_joins_those_of_the_table(run: Callable[..., PickerSettings]) -> None:
    models = "models: {served: [{name: big, aliases: [b]}]}"
    settings = run("--endpoints", PODS, "--model", "tiny", "--policy", models)
    assert [model.name for model in settings.model_table.served] == ["tiny", "big"]
    assert run("--endpoints", PODS, "--model", "b", "--policy", models).model_table.served[0].name == "big"


@pytest.mark.parametrize("flag", ["--strategy", "--weights", "--stale-after-ms", "--models", "--priorities"])
def test_single_fields_of_the_policy_are_no_flags(run: Callable[..., PickerSettings], flag: str) -> None:
    with pytest.raises(Exception, match=f"No such option: {flag}"):
        run("--endpoints", PODS, flag, "1")


def test_the_policy_file_may_be_a_resource(run: Callable[..., PickerSettings], tmp_path: Path) -> None:
    text = (
        "apiVersion: kvmesh.io/v1alpha1\nkind: InferencePolicy\nmetadata: {name: a}\nspec: {scoring: {fallbacks: 1}}\n"
    )
    assert run("--endpoints", PODS, "--policy", config(tmp_path, text)).policy.fallbacks == 1
