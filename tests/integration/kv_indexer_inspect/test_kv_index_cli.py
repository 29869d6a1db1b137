"""`kvmesh index …` against a real Redis: what it prints, in JSON above all, and its exit codes."""

import asyncio
import contextlib
import json
from array import array
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import typer

from extproc.prompts.tokenizer import ModelTokenizer
from extproc.requests.openai import parse_request
from kvmesh.blocks.block_keys import block_keys, root_key
from kvmesh.blocks.index_changes import Store, pack_hashes
from kvmesh.blocks.source import SourceState, Stream
from operate import cli
from podsim.model_folder import TINY_MODEL
from tests.integration.kv_index import A1, A, B, blocks, redis_index
from tests.integration.kv_redis import RedisServer, free_port
from tests.unit.kv_indexer_follow.kv_fakes import BLOCK, prompt

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run `kvmesh index …`; return its exit code, what it printed and what it complained about."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("kv_indexer.inspect.inspect_command.RATE_SECONDS", 0.01)

    def command(*arguments: str) -> tuple[int, str, str]:
        root: Any = cli.build()
        code = root(["index", *arguments], prog_name="kvmesh", standalone_mode=False) or 0
        return code, *capsys.readouterr()

    return command


def fill(server: RedisServer) -> None:
    async def write() -> None:
        async with redis_index(server) as index:
            await index.apply(A, blocks(1, 50), blocks(1, 9, tier="CPU"))
            await index.apply(B, blocks(1, 20))
            claim, position = await index.claim(B), await index.position(B)
            await index.writer.set_state(claim, epoch=position.epoch, state=SourceState.LIVE)

    asyncio.run(write())


def parsed(answer: tuple[int, str, str]) -> Any:
    code, out, err = answer
    assert (code, err) == (0, "")
    return json.loads(out)


def test_sources_as_json_have_stable_fields(run: Run, redis_server: RedisServer) -> None:
    fill(redis_server)

    report = parsed(run("sources", "--redis", redis_server.url, "-o", "json"))

    assert sorted(report) == ["findings", "indexer_alive", "sources", "unreadable"]
    assert report["indexer_alive"] is True
    line = report["sources"][-1]
    assert (line.pop("idle_seconds") >= 0, line.pop("lag_seconds") > 0) == (True, True)
    assert line == {
        "endpoint": B.endpoint,
        "dp_rank": 0,
        "tier": "GPU",
        "slot": 2,
        "state": "live",
        "reason": "",
        "epoch": 2,
        "last_seq": 0,
        "blocks": 20,
        "block_size": BLOCK,
        "events": 1,
        "events_per_second": 0.0,
        "owner": "test",
    }


def test_sources_are_a_table_for_people(run: Run, redis_server: RedisServer) -> None:
    fill(redis_server)

    code, out, _ = run("sources", "--redis", redis_server.url)

    assert code == 0
    assert out.splitlines()[0].split() == [
        *("source", "tier", "state", "epoch", "sequence", "lag", "blocks", "events/s"),
    ]
    assert [line.split()[:3] for line in out.splitlines()[1:4]] == [
        [A.name, "CPU", "live"],
        [A.name, "GPU", "live"],
        [B.name, "GPU", "live"],
    ]


def test_a_finding_of_an_indexer_is_shown(run: Run, redis_server: RedisServer) -> None:
    client: Any = redis_server.client()
    now = client.time()[0]
    finding = {"endpoint": A.endpoint, "dp_rank": None, "reason": "no-events", "message": "look", "since": 1.0}
    client.hset("{kv2}findings", f"{A.endpoint} no-events", json.dumps({**finding, "seen": now, "indexer": "one"}))

    report = parsed(run("sources", "--redis", redis_server.url, "-o", "json"))

    assert report["findings"] == [finding]


def test_verify_ends_with_0_without_and_with_1_with_differences(run: Run, redis_server: RedisServer) -> None:
    fill(redis_server)
    clean = parsed(run("verify", "--redis", redis_server.url, "-o", "json"))
    client: Any = redis_server.client()
    client.set("{kv2}bLEFTOVER", 9)
    code, out, _ = run("verify", "--redis", redis_server.url, "-o", "json")
    words = run("verify", "--redis", redis_server.url)

    assert (clean["counts"], clean["held_blocks"], clean["block_keys"]) == ({}, 79, 50)
    assert (code, json.loads(out)["counts"]) == (1, {"leftover": 1})
    assert json.loads(out)["listed"] == [{"kind": "leftover", "where": "slot 9", "detail": "block 4c4546544f564552"}]
    assert words[0] == 1
    assert "leftover: 1 (a block key names a slot without a source, left by the sweep)" in words[1]


def test_size_is_about_what_redis_says(run: Run, redis_server: RedisServer) -> None:
    client: Any = redis_server.client()

    async def write() -> None:
        async with redis_index(redis_server) as index:
            before.append(client.info("memory")["used_memory"])
            for first in range(1, 30_000, 1000):
                await index.apply(A, blocks(first, first + 999))

    before: list[int] = []
    asyncio.run(write())
    real = client.info("memory")["used_memory"] - before[0]

    report = parsed(run("size", "--redis", redis_server.url, "-o", "json"))

    (source,) = report["sources"]
    assert (source["endpoint"], source["tier"], source["blocks"], source["holders"]) == (A.endpoint, "GPU", 30_000, 1.0)
    assert 0.8 < source["bytes"] / real < 1.25
    assert 0.7 < source["formula_bytes"] / real < 2  # of Redis 6.2; Valkey 9 needs less
    assert report["bytes"] == source["bytes"] <= report["redis_bytes"]


def test_lookup_of_token_ids_tells_who_holds_them(run: Run, redis_server: RedisServer, tmp_path: Path) -> None:
    fill(redis_server)
    path = tmp_path / "tokens.json"
    path.write_text(json.dumps(list(array("I", prompt(40)))), encoding="utf-8")

    report = parsed(run("lookup", str(path), "--model", "tiny", "--redis", redis_server.url, "-o", "json"))

    (found,) = report["prompts"]
    assert [(one["endpoint"], one["matched_blocks"], one["tiers"]) for one in found["endpoints"]] == [
        (A.endpoint, 40, {"GPU": 40}),
        (B.endpoint, 20, {"GPU": 20}),
    ]
    assert found["endpoints"][0]["matched_tokens"] == 40 * BLOCK
    other = parsed(run("lookup", str(path), "--model", "huge", "--redis", redis_server.url, "-o", "json"))
    assert [one["matched_blocks"] for one in other["prompts"][0]["endpoints"]] == [0, 0]


def test_lookup_of_a_request_body_tokenizes_it_as_the_picker_does(
    run: Run, redis_server: RedisServer, tmp_path: Path
) -> None:
    body = {"model": "tiny", "prompt": "a prompt of more than one block " * 20, "cache_salt": "s"}
    tokens = ModelTokenizer.load(TINY_MODEL).token_buffers(
        parse_request(path="/v1/completions", body=json.dumps(body).encode())
    )[0]
    blocks_held = len(tokens) // 4 // 16
    keys = block_keys(tokens, block_size=16, parent=root_key(hash_seed="kvmesh", model="tiny", cache_salt="s"))

    async def write() -> None:
        async with redis_index(redis_server) as index:
            hashes = pack_hashes(range(blocks_held))
            await index.apply(A, Store(tier="GPU", group=0, block_size=16, hashes=hashes, keys=keys))

    asyncio.run(write())
    path = tmp_path / "body.json"
    path.write_text(json.dumps(body), encoding="utf-8")
    options = ("--model", "tiny", "--redis", redis_server.url, "-o", "json", "--tokenizer", str(TINY_MODEL))

    (found,) = parsed(run("lookup", str(path), *options))["prompts"]

    assert found["tokens"] == len(tokens) // 4
    assert [one["matched_blocks"] for one in found["endpoints"]] == [(len(tokens) // 4 - 1) // 16]
    path.write_text(json.dumps({**body, "cache_salt": "other"}), encoding="utf-8")
    (other,) = parsed(run("lookup", str(path), *options))["prompts"]
    assert [one["matched_blocks"] for one in other["endpoints"]] == [0]


def test_clear_hides_all_ranks_of_an_endpoint(run: Run, redis_server: RedisServer) -> None:
    async def write() -> None:
        async with redis_index(redis_server) as index:
            for stream in (A, A1, B):
                await index.apply(stream, blocks(1, 20))

    asyncio.run(write())
    report = parsed(run("clear", A.endpoint, "--yes", "--redis", redis_server.url, "-o", "json"))
    after = parsed(run("sources", "--redis", redis_server.url, "-o", "json"))

    assert report == {
        "cleared": [
            {"stream": A.name, "epoch": 4, "owner": "test"},
            {"stream": A1.name, "epoch": 5, "owner": "test"},
        ]
    }
    assert [(line["endpoint"], line["dp_rank"], line["blocks"]) for line in after["sources"]] == [
        (A.endpoint, 0, 0),
        (A.endpoint, 1, 0),
        (B.endpoint, 0, 20),
    ]


@pytest.mark.parametrize(("answer", "blocks_left"), [("n\n", 20), ("", 20), ("y\n", 0)])
def test_clear_asks_first(
    run: Run,
    redis_server: RedisServer,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    answer: str,
    blocks_left: int,
) -> None:
    fill(redis_server)
    monkeypatch.setattr("sys.stdin", StringIO(answer))
    with contextlib.suppress(typer.Abort):
        run("clear", B.name, "--redis", redis_server.url)
    capsys.readouterr()

    after = parsed(run("sources", "--redis", redis_server.url, "-o", "json"))
    assert after["sources"][-1]["blocks"] == blocks_left


def test_an_unknown_source_is_wrong_usage_and_named(run: Run, redis_server: RedisServer) -> None:
    fill(redis_server)

    code, out, err = run("clear", "nobody:1", "--yes", "--redis", redis_server.url)

    assert (code, out) == (2, "")
    assert err == f"kvmesh index clear: the index knows no source 'nobody:1'; it knows {A.name}, {B.name}\n"


@pytest.mark.parametrize("command", ["sources", "verify", "size"])
def test_an_empty_redis_is_an_empty_index(run: Run, redis_server: RedisServer, command: str) -> None:
    code, out, err = run(command, "--redis", redis_server.url)

    assert (code, err) == (0, "")
    assert ("The index is empty" in out) is (command != "verify")


@pytest.mark.parametrize(("command", "code"), [("sources", 1), ("verify", 2), ("size", 1)])
def test_without_redis_a_command_fails_with_one_line(run: Run, command: str, code: int) -> None:
    address = f"redis://127.0.0.1:{free_port()}"

    answer = run(command, "--redis", address)

    assert answer[:2] == (code, "")
    assert answer[2].startswith(f"kvmesh index {command}: cannot connect to Redis")
    assert answer[2].count("\n") == 1


@pytest.mark.parametrize("command", ["sources", "verify", "size"])
def test_keys_of_another_type_are_named(run: Run, redis_server: RedisServer, command: str) -> None:
    redis_server.client().set("{kv2}registry", "somebody else's")

    code, _, err = run(command, "--redis", redis_server.url)

    assert code == (2 if command == "verify" else 1 if command == "sources" else 0)
    assert code == 0 or "registry" in err


def test_a_stream_record_of_another_type_is_a_difference_and_not_believed(run: Run, redis_server: RedisServer) -> None:
    fill(redis_server)
    stranger = Stream(endpoint="10.9.9.9:1")
    client: Any = redis_server.client()
    client.set(f"{{kv2}}stream:{stranger.name}", "x")
    client.sadd("{kv2}streams", stranger.name)

    code, out, _ = run("verify", "--redis", redis_server.url, "-o", "json")

    assert (code, json.loads(out)["counts"]) == (1, {"stream": 1, "unreadable": 1})
