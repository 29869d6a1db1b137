"""Planted at the pods: each misconfiguration is found by its check, and the fix is named. Real pods, indexer, Redis."""

from dataclasses import replace
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest

from extproc.models.models import ModelTable, ServedModel, TokensFrom
from extproc.pages.findings import Severity
from kvmesh.pods.pod_access import PodAccess
from operate.doctor.examine import DoctorSettings, examine
from tests.integration.doctor_mesh import (
    HEALTHY,
    Tampered,
    changed_json,
    findings,
    indexer,
    only,
    picker_settings,
    pods,
    replaced,
    two_ports,
)
from tests.integration.envoy_process import HOST
from tests.integration.keyed_pods import KEY, address_of, keyed_pod, write_key
from tests.integration.kv_redis import RedisServer

A_DAY_AGO = formatdate(1_700_000_000, usegmt=True)


def without(field: str) -> Any:
    return changed_json(lambda ranks: {rank: {**said, field: None} for rank, said in ranks.items()})


def also_called(name: str) -> Any:
    return changed_json(lambda page: {**page, "data": [*page["data"], {**page["data"][0], "id": name}]})


# what is planted, the check that finds it, how bad it is, what it saw, what the fix says
PLANTED = {
    "another model is served": (
        Tampered(pages={"/v1/models": replaced('"id":"tiny"', '"id":"big"')}),
        *("models-served", Severity.ERROR, "serves big, and the picker is set up for tiny", "--served-model-name tiny"),
    ),
    "a name that the picker does not know": (
        Tampered(pages={"/v1/models": also_called("tiny-alias")}),
        *("models-served", Severity.WARNING, "also answers to tiny-alias", "`aliases`"),
    ),
    "prefix caching is off": (
        Tampered(pages={"/metrics": replaced('enable_prefix_caching="True"', 'enable_prefix_caching="False"')}),
        *("prefix-caching", Severity.ERROR, 'enable_prefix_caching="False"', "--enable-prefix-caching"),
    ),
    "no replay socket": (
        Tampered(pages={"/kv_event_sources": without("replay_endpoint")}),
        *("replay-socket", Severity.WARNING, "has no replay endpoint", '"replay_endpoint": "tcp://*:5558"'),
    ),
    "an old vLLM": (
        Tampered(pages={"/version": lambda _: b'{"version": "0.7.3"}'}),
        *("vllm-version", Severity.ERROR, "runs vLLM 0.7.3", "update it"),
    ),
    "a vLLM that does not tell its groups": (
        Tampered(pages={"/version": lambda _: b'{"version": "0.20.1"}'}),
        *("vllm-version", Severity.WARNING, "kind of a KV cache group", "0.22 or newer"),
    ),
    "no version": (
        Tampered(pages={"/version": 404}),
        *("vllm-version", Severity.UNCHECKED, "/version says None", "check that the API server there is vLLM's"),
    ),
    "a clock that is wrong": (
        Tampered(headers={"Date": A_DAY_AGO}),
        *("clocks", Severity.WARNING, "behind this machine's", "NTP"),
    ),
    "another block size than its events have": (
        Tampered(
            pages={
                "/metrics": lambda page: replaced('effective_attention_block_size="16"', 'x="32"')(
                    replaced('{block_size="16"', '{block_size="32"')(page)
                )
            }
        ),
        *("block-size", Severity.ERROR, "has blocks of 32 tokens, and its events have 16", "kvmesh index clear"),
    ),
}


@pytest.mark.parametrize("name", PLANTED)
async def test_what_a_pod_has_wrong_is_found_and_the_fix_named(name: str, redis_server: RedisServer) -> None:
    planted, check, severity, seen, fix = PLANTED[name]
    async with pods(planted) as addresses, indexer(redis_server.url, addresses):
        found = await findings(picker_settings(redis_server.url, addresses))

    of_check = [finding for finding in found if finding.check == check]
    assert of_check, found
    assert (of_check[0].severity, of_check[0].subject) == (severity, addresses[0])
    assert seen in of_check[0].seen
    assert fix in of_check[0].fix


async def test_a_pod_that_is_not_there_is_found_and_nothing_else_is_said_of_it(redis_server: RedisServer) -> None:
    async with pods(HEALTHY) as addresses, indexer(redis_server.url, addresses):
        nobody = f"{HOST}:{two_ports()[0]}"
        found = await findings(picker_settings(redis_server.url, [*addresses, nobody]))

    assert [(finding.check, finding.severity, finding.subject) for finding in found] == [
        ("pods-answer", Severity.ERROR, nobody),
        ("index-follows", Severity.ERROR, nobody),
    ]
    assert "--endpoints" in found[0].fix


async def test_something_else_at_a_pods_address_is_no_pod(redis_server: RedisServer) -> None:
    async with pods(Tampered(pages={"/metrics": lambda _: b"up 1\n"})) as addresses:
        found = await findings(picker_settings(redis_server.url, addresses))

    assert found[0].check == "pods-answer"
    assert "no engine that is known here" in found[0].seen


async def test_a_pod_that_publishes_no_events_is_told_the_flag(redis_server: RedisServer) -> None:
    async with (
        pods(Tampered(pages={"/kv_event_sources": lambda _: b'{"0": null}'})) as addresses,
        indexer(redis_server.url, addresses, live=False),
    ):
        found = await findings(picker_settings(redis_server.url, addresses), visible_within_seconds=0.1)

    [publisher] = [finding for finding in found if finding.check == "event-publisher"]
    assert (publisher.severity, publisher.seen) == (Severity.ERROR, "publishes no KV events")
    assert "--kv-events-config" in publisher.fix


async def test_two_pods_that_name_one_events_address_are_found(redis_server: RedisServer) -> None:
    addresses_of_events: dict[str, bytes] = {}

    def remembered(page: bytes) -> bytes:
        return addresses_of_events.setdefault("first", page)

    both = Tampered(pages={"/kv_event_sources": remembered})
    async with pods(both, both) as addresses:
        found = await findings(picker_settings(redis_server.url, addresses), trial=False)

    [publisher] = [finding for finding in found if finding.check == "event-publisher"]
    assert set(publisher.subject.split(", ")) == set(addresses)
    assert "--event-sources" in publisher.fix


async def test_pods_that_do_not_render_are_told_the_flag(redis_server: RedisServer) -> None:
    rendered = ModelTable(served=(ServedModel(name="tiny", tokens_from=TokensFrom.RENDER),))
    async with pods(Tampered(scale_out=False)) as addresses, indexer(redis_server.url, addresses):
        found = await findings(
            picker_settings(redis_server.url, addresses, model=None, tokenizer=None, models=rendered)
        )

    finding = only(found, "render")
    assert finding.severity is Severity.ERROR
    assert "--enable-scale-out" in finding.fix


async def test_pods_of_a_model_without_a_folder_are_asked_whether_they_tokenize(redis_server: RedisServer) -> None:
    nobody_said = ModelTable(served=(ServedModel(name="tiny"),))
    async with (
        pods(HEALTHY, Tampered(scale_out=False)) as [whole, plain],
        indexer(redis_server.url, [whole, plain]),
    ):
        settings = picker_settings(redis_server.url, [whole, plain], model=None, tokenizer=None, models=nobody_said)
        found = await examine(DoctorSettings(picker=settings, timeout_seconds=10.0, visible_within_seconds=10.0))

    [finding] = [each for each in found if each.check == "render"]
    assert (finding.severity, finding.subject) == (Severity.OK, "tiny")
    assert plain in finding.seen
    assert whole not in finding.seen


async def test_pods_of_one_model_with_two_block_sizes_are_found(redis_server: RedisServer) -> None:
    async with pods(HEALTHY, Tampered(block_size=32)) as addresses, indexer(redis_server.url, addresses):
        found = await findings(picker_settings(redis_server.url, addresses))

    finding = only(found, "block-size")
    assert (finding.severity, finding.subject) == (Severity.WARNING, "tiny")
    assert "--block-size" in finding.fix


async def test_a_picker_without_a_model_is_found(redis_server: RedisServer) -> None:
    async with pods(HEALTHY) as addresses, indexer(redis_server.url, addresses):
        found = await findings(picker_settings(redis_server.url, addresses, model=None, tokenizer=None))

    finding = only(found, "models-served")
    assert finding.severity is Severity.WARNING
    assert "--tokenizer" in finding.fix


async def test_pods_that_want_a_key_are_found_and_the_flag_is_named(redis_server: RedisServer) -> None:
    refuses = {"/v1/models": 401, "/v1/completions": 401, "/v1/completions/render": 401}
    async with pods(Tampered(pages=refuses)) as addresses, indexer(redis_server.url, addresses):
        found = await examine(DoctorSettings(picker=picker_settings(redis_server.url, addresses), timeout_seconds=10.0))

    [finding] = [each for each in found if each.check == "pod-key"]
    assert (finding.severity, finding.subject) == (Severity.ERROR, addresses[0])
    assert finding.seen == "/v1/models: the pod wants a key: give --pod-key-file"
    assert "--pod-key-file of picker, indexer and this command" in finding.fix
    [served] = [each for each in found if each.check == "models-served"]
    assert (served.severity, served.subject) == (Severity.UNCHECKED, addresses[0])
    [tried] = [each for each in found if each.check == "same-keys"]
    assert "the pod wants a key: give --pod-key-file" in tried.seen


async def test_the_doctor_shows_pods_the_key(redis_server: RedisServer, tmp_path: Path) -> None:
    access = PodAccess(key_file=write_key(tmp_path / "key", KEY))
    async with keyed_pod(KEY) as pod, indexer(redis_server.url, [address_of(pod)], pod_access=access):
        settings = replace(picker_settings(redis_server.url, [address_of(pod)]), pod_access=access)
        found = await examine(DoctorSettings(picker=settings, timeout_seconds=10.0, visible_within_seconds=10.0))

    by_check = {each.check: each.severity for each in found}
    assert {by_check[check] for check in ("pod-key", "models-served", "same-keys")} == {Severity.OK}
