"""`kvmesh policy simulate`: the whole question, from files to a table or JSON."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from typer.testing import CliRunner

from extproc.errors import ConfigError
from extproc.records.access_log import NameHashes
from extproc.records.audit_chain import AuditKey
from extproc.replay_log.commands import app
from extproc.replay_log.policy_file import read_policy
from extproc.replay_log.question import ASSUMED, pod_pace, read_pod
from tests.unit.extproc_replay_log.recorded import ALONE, PROMPT, alone, encoded, line, refused

LIMITED = {"quotas": [{"tenant": "*", "requestsPerMinute": 1, "burstSeconds": 60}]}


def files(folder: Path, records: list[Any], **policies: Any) -> dict[str, str]:
    """Write a log and policies; return their paths."""
    (folder / "access.log").write_bytes(b"".join(encoded(records)))
    for name, policy in policies.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(policy), encoding="utf-8")
    return {name: str(folder / f"{name}.yaml") for name in policies} | {"log": str(folder / "access.log")}


def run(*arguments: str, group: bool = True) -> str:
    result = CliRunner().invoke(app, [*(["policy"] if group else []), "simulate", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def answered(*arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.json.decode(run(*arguments, "-o", "json"))
    return found


def sums(found: dict[str, Any], run_name: str, class_name: str = "standard", tenant: str = "*") -> dict[str, Any]:
    (groups,) = [each["groups"] for each in found["runs"] if each["run"] == run_name]
    (group,) = [each for each in groups if (each["class"], each["tenant"]) == (class_name, tenant)]
    return dict(group)


def test_recorded_and_simulated_stand_side_by_side(tmp_path: Path) -> None:
    paths = files(tmp_path, alone(100, every=20.0), now={}, new=LIMITED)
    found = answered("--policy", paths["new"], "--beside", paths["now"], "--trace", paths["log"])
    assert [each["run"] for each in found["runs"]] == ["recorded", "now", "new"]
    assert (sums(found, "recorded")["served"], sums(found, "now")["served"]) == (100, 100)
    limited = sums(found, "new")  # one a minute, of three
    assert 32 <= limited["served"] <= 36
    assert limited["refused"] == {"quota-exceeded": 100 - limited["served"]}
    assert (found["pods"], found["requests"], found["outputs"]["counted"]) == (2, 100, 100)
    assert found["pod"]["seconds_a_prompt_token"] == pytest.approx(PROMPT, rel=0.02)
    assert found["notes"] == []


def test_a_policy_file_without_an_end_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"/dev/zero.* at most 4194304 are read"):
        read_policy(Path("/dev/zero"))


def test_a_pool_may_have_the_ports_that_install_takes(tmp_path: Path) -> None:
    paths = files(tmp_path, [line(at, pool="llm/chat") for at in range(5)] + [line(9.0, pool="llm/code")], new={})
    asked = ("--policy", paths["new"], "--trace", paths["log"], "--pool")
    assert answered(*asked, "llm/chat:8000")["requests"] == 5
    with pytest.raises(ConfigError, match="--pool: 'chat' is not NAMESPACE/NAME"):
        run(*asked, "chat")


def test_a_policy_called_recorded_is_not_taken_for_what_was(tmp_path: Path) -> None:
    paths = files(tmp_path, alone(40), recorded=LIMITED, now={})
    found = answered("--policy", paths["recorded"], "--trace", paths["log"])
    assert [each["run"] for each in found["runs"]] == ["recorded", paths["recorded"]]
    assert sums(found, "recorded")["served"] == 40
    found = answered("--policy", paths["now"], "--beside", paths["recorded"], "--trace", paths["log"])
    assert [each["run"] for each in found["runs"]] == ["recorded", paths["recorded"], paths["now"]]


def test_a_log_may_come_through_a_pipe(tmp_path: Path) -> None:
    paths = files(tmp_path, alone(40), new={})
    arguments = ["simulate", "--policy", paths["new"], "--trace", "-", "-o", "json"]
    result = CliRunner().invoke(app, arguments, input=Path(paths["log"]).read_bytes())
    assert msgspec.json.decode(result.stdout)["requests"] == 40


def test_the_table_has_a_line_for_each_run_of_each_class(tmp_path: Path) -> None:
    records = [*alone(40), refused(5.0, class_="batch", tenant="[red]\x1b[31m")]
    paths = files(tmp_path, records, new={})
    shown = run("--policy", paths["new"], "--trace", paths["log"], group=False)
    assert "\x1b" not in shown
    lines = [line.split() for line in shown.splitlines()]
    assert ["batch", "*", "recorded", "1", "0", "1", "(shed", "1)"] in [words[:8] for words in lines]
    assert ["new", "1", "1", "0"] in [words[:4] for words in lines]
    assert "note: 1 requests reached no pod: their work is that of a served one of their kind" in shown
    assert "note: new: has no class batch: its requests take the default class standard" in shown


def test_what_is_given_of_a_pod_goes_before_what_the_log_shows(tmp_path: Path) -> None:
    paths = files(tmp_path, alone(40), new={})
    options = ("--policy", paths["new"], "--trace", paths["log"])
    slow = answered(*options, "--pod", "prefill=100,step-ms=50", "--pods", "1")
    assert (slow["pods"], slow["pod"]["step_seconds"], slow["pod"]["seconds_a_prompt_token"]) == (1, 0.05, 0.01)
    assert sums(slow, "new")["ttft_p50_seconds"] > 5 * sums(answered(*options), "new")["ttft_p50_seconds"]


def test_without_counted_tokens_the_pods_are_assumed_and_it_is_said(tmp_path: Path) -> None:
    paths = files(tmp_path, [line(float(number)) for number in range(5)], new={})
    found = answered("--policy", paths["new"], "--trace", paths["log"])
    assert found["pod"]["step_seconds"] == ASSUMED.alone_seconds
    assert "what is not given is assumed" in found["notes"][0]
    given = answered("--policy", paths["new"], "--trace", paths["log"], "--pod", "prefill=9000,step-ms=8")
    assert not any("assumed" in note for note in given["notes"])
    nowhere = files(tmp_path, [refused(0.0)], new={})
    with pytest.raises(ConfigError, match="give --pods"):
        run("--policy", nowhere["new"], "--trace", nowhere["log"])


def test_tenants_of_quotas_are_found_by_the_pickers_own_key(tmp_path: Path) -> None:
    secret = "0123456789abcdef"
    hashed = NameHashes(AuditKey(id="k", secret=secret.encode()).for_names).tenant("acme")
    acme = {"quotas": [{"tenant": "acme", "requestsPerMinute": 1, "burstSeconds": 60}]}
    paths = files(tmp_path, [line(number, tenant=hashed, output_tokens=1) for number in range(20)], new=acme)
    options = ("--policy", paths["new"], "--trace", paths["log"])
    found = answered(*options)
    assert sums(found, "new")["served"] == 20
    assert any("name acme, and the log has hashes" in note for note in found["notes"])
    (tmp_path / "keys").write_text(f"k:{secret}\n", encoding="utf-8")
    found = answered(*options, "--audit-key-file", str(tmp_path / "keys"))
    assert sums(found, "new")["refused"] == {"quota-exceeded": 19}
    assert not any("hashes" in note for note in found["notes"])


def test_a_part_of_the_log_may_be_replayed(tmp_path: Path) -> None:
    paths = files(tmp_path, alone(40, every=60.0), new={})
    options = ("--policy", paths["new"], "--trace", paths["log"])
    begins = ("--from", "2027-01-15T08:10:00", "--to", "2027-01-15T08:20:00")  # START is 08:00:00
    assert answered(*options, *begins)["requests"] == 10
    with pytest.raises(ConfigError, match="came from 2027-01-15T08:00:00"):
        run(*options, "--from", "2030-01-01T00:00:00")


def test_a_policy_that_is_wrong_is_named_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text("scoring:\n  weights: {prefx: 1}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"bad.yaml:2: spec.scoring.weights.prefx: unknown field"):
        read_policy(file)
    file.write_text("scoring: {}\n---\nscoring: {}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="has 2 policies, and one is replayed"):
        read_policy(file)
    with pytest.raises(ConfigError, match="cannot read"):
        read_policy(tmp_path / "none.yaml")
    file.write_text("priorities: {defaultClass: none}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="there is no class 'none'"):
        read_policy(file)


@pytest.mark.parametrize("text", ["prefil=1", "prefill", "prefill=0", "prefill=x", "running=-1", "step-ms=nan"])
def test_nonsense_of_a_pod_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--pod"):
        read_pod(text)


def test_all_parts_of_a_pod_can_be_given() -> None:
    given = read_pod("prefill=1000,step-ms=20,stream-us=5,base-ms=0,running=8,step-tokens=64,cache-tokens=999")
    pace = pod_pace(None, given)
    assert (pace.seconds_a_prompt_token, pace.alone_seconds, pace.base_seconds) == (0.001, ALONE, 0.0)
    assert (pace.most_running, pace.step_tokens, pace.cache_tokens) == (8, 64, 999)
    assert pace.seconds_a_stream == pytest.approx(5e-6)
