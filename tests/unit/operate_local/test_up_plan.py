"""What `kvmesh up` would start, with which flags; nothing is started."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from kvmesh.pods.pod_access import PodAccess
from operate.local.envoy_config import SocketAddress
from operate.local.ports import MeshPorts, PortUse
from operate.local.service import LocalParts, fixed_ports, plan
from operate.local.stack_settings import BodyDelivery
from tests.unit.operate_local.local_settings import settings

KVMESH = f"{sys.executable} -m operate"
REAL_PODS = (SocketAddress(host="10.0.0.1", port=8000), SocketAddress(host="::1", port=8000))


def parts(*, redis_program: Path | None = Path("/bin/redis-server")) -> LocalParts:
    return LocalParts(
        run_directory=Path("/run"),
        envoy_program=Path("/bin/envoy"),
        envoy_config=Path("/run/envoy.json"),
        redis_program=redis_program,
        redis="rediss://:hunter2@127.0.0.1:7000/0?ca_file=/tls/ca.pem",
    )


def test_the_whole_mesh_is_planned_in_two_stages_with_every_flag_spelled_out() -> None:
    stages = plan(settings(), parts())

    assert [{spec.name: " ".join(spec.argv) for spec in stage} for stage in stages] == [
        {
            "redis": "/bin/redis-server --port 0 --unixsocket /run/redis"
            " --save  --appendonly no --dir /run --daemonize no",
            "pod-0": f"{KVMESH} sim --host 127.0.0.1 --sim-port 8101 --pods 1 --model tiny --tokenizer /tok",
            "pod-1": f"{KVMESH} sim --host 127.0.0.1 --sim-port 8102 --pods 1 --model tiny --tokenizer /tok",
        },
        {
            "indexer": f"{KVMESH} indexer --host 127.0.0.1 --indexer-admin-port 9091"
            " --endpoints 127.0.0.1:8101,127.0.0.1:8102 --model tiny",
            "extproc": f"{KVMESH} extproc --respawn --host 127.0.0.1 --grpc-port 9002 --admin-port 9090"
            " --endpoints 127.0.0.1:8101,127.0.0.1:8102 --model tiny --tokenizer /tok"
            " --drain-seconds 0",
            "envoy": "/bin/envoy -c /run/envoy.json --log-level warning --disable-hot-restart --concurrency 2",
        },
    ]


def test_every_process_has_a_condition_to_be_ready() -> None:
    conditions = {
        spec.name: [str(condition) for condition in spec.ready] for stage in plan(settings(), parts()) for spec in stage
    }

    assert conditions == {
        "redis": ["PING rediss://127.0.0.1:7000/0"],
        "pod-0": ["GET http://127.0.0.1:8101/health"],
        "pod-1": ["GET http://127.0.0.1:8102/health"],
        "indexer": ["GET http://127.0.0.1:9091/readyz"],
        "extproc": ["GET http://127.0.0.1:9090/readyz", "gRPC health of 127.0.0.1:9002"],
        "envoy": ["GET http://127.0.0.1:9901/ready"],
    }


def test_children_get_redis_through_their_environment_where_no_other_user_reads_its_password() -> None:
    specs = [spec for stage in plan(settings(), parts()) for spec in stage]

    expected = {"KVMESH_REDIS": "rediss://:hunter2@127.0.0.1:7000/0?ca_file=/tls/ca.pem"}
    assert {spec.name: spec.environment for spec in specs if spec.environment} == {
        "indexer": expected,
        "extproc": expected,
    }
    assert "hunter2" not in f"{specs}"


def test_real_pods_and_a_foreign_redis_are_used_and_not_started() -> None:
    stages = plan(settings(endpoints=REAL_PODS, model=None, tokenizer=None), parts(redis_program=None))

    assert [[spec.name for spec in stage] for stage in stages] == [[], ["indexer", "extproc", "envoy"]]
    indexer, picker, _ = stages[1]
    assert " ".join(indexer.argv).endswith("--endpoints 10.0.0.1:8000,[::1]:8000")
    assert " ".join(picker.argv).endswith("--endpoints 10.0.0.1:8000,[::1]:8000 --drain-seconds 0")


def test_the_picker_is_told_the_share_of_the_answers_that_it_reads() -> None:
    stages = plan(replace(settings(), sample_share=1.0), parts())
    argv = next(spec.argv for spec in stages[1] if spec.name == "extproc")
    assert argv[argv.index("--sample-share") + 1] == "1.0"


def test_the_indexer_gets_the_event_sources_and_every_role_the_shared_flags() -> None:
    flags = ("--log-level", "debug", "--log-format", "json")
    stages = plan(settings(event_sources='{"10.0.0.1:8000": {}}', shared_flags=flags), parts())

    argv = {spec.name: spec.argv for stage in stages for spec in stage}
    assert argv["indexer"][-6:] == ("--event-sources", '{"10.0.0.1:8000": {}}', *flags)
    assert [name for name in argv if argv[name][-4:] == flags] == ["pod-0", "pod-1", "indexer", "extproc"]


def test_the_picker_is_told_the_policy_and_nothing_where_there_is_none() -> None:
    argv = next(
        spec.argv
        for stage in plan(replace(settings(), policy="p.yaml"), parts())
        for spec in stage
        if spec.name == "extproc"
    )
    assert argv[argv.index("--policy") + 1] == "p.yaml"
    assert "--policy" not in str(plan(settings(), parts()))


def test_picker_and_indexer_get_the_token_file_of_the_admin_pages_and_nobody_else_does() -> None:
    specs = {
        spec.name: spec.argv
        for stage in plan(replace(settings(), admin_token_file=Path("/t")), parts())
        for spec in stage
    }
    told = {name for name, argv in specs.items() if "--admin-token-file" in argv}
    assert told == {"indexer", "extproc"}
    assert all(specs[name][specs[name].index("--admin-token-file") + 1] == "/t" for name in told)


def test_the_ports_that_must_be_free_are_listed_with_their_purpose() -> None:
    assert fixed_ports(settings()) == (
        PortUse(port=10000, purpose="the gateway (Envoy)"),
        PortUse(port=9901, purpose="Envoy's admin page"),
        PortUse(port=9002, purpose="the picker's gRPC"),
        PortUse(port=9090, purpose="the picker's admin page"),
        PortUse(port=9091, purpose="the indexer's admin page"),
        PortUse(port=8101, purpose="simulated pod 0"),
        PortUse(port=8102, purpose="simulated pod 1"),
    )


def test_ports_from_a_base_are_neighbours_and_real_pods_need_none() -> None:
    moved = replace(settings(endpoints=REAL_PODS), ports=MeshPorts.starting_at(20000))
    assert [use.port for use in fixed_ports(moved)] == list(range(20000, 20005))


@pytest.mark.parametrize(
    ("mode", "file"), [(BodyDelivery.DUPLEX, "local.yaml"), (BodyDelivery.BUFFERED, "buffered.yaml")]
)
def test_each_way_of_body_delivery_has_its_envoy_file(mode: BodyDelivery, file: str) -> None:
    assert mode.envoy_file == file


def test_simulated_pods_want_the_key_that_picker_and_indexer_show_and_no_flag_tells_it(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("sk-planted\n", encoding="utf-8")
    access = PodAccess(key_file=file)
    specs = {spec.name: spec for stage in plan(replace(settings(), pod_access=access), parts()) for spec in stage}

    wanting = {name for name, spec in specs.items() if spec.environment.get("KVMESH_API_KEY") == "sk-planted"}
    assert wanting == {"pod-0", "pod-1"}
    assert {name for name, spec in specs.items() if "--pod-key-file" in spec.argv} == {"indexer", "extproc"}
    assert "sk-planted" not in f"{specs}"
