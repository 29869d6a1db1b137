"""`kvmesh up` with a Redis that has a password: it works, and nobody can read the password beside it."""

import re
from pathlib import Path

import pytest

from tests.e2e.stack import running_stack
from tests.integration.kv_redis import RedisServer

PASSWORD = "hunter2-s3cret"
PAGES = ("admin", "indexer_admin")
LOGS = re.compile(r"^logs +(\S+)", re.MULTILINE)
PROMPT = " ".join(f"word{i} of a story about passwords" for i in range(80))


@pytest.mark.parametrize("way", ["in the address", "in a file"])
async def test_a_password_is_used_and_shown_nowhere(way: str, tmp_path: Path) -> None:
    (tmp_path / "redis").mkdir()
    redis = RedisServer(tmp_path / "redis")
    redis.start()
    redis.client().config_set("requirepass", PASSWORD)
    (tmp_path / "password").write_text(f"{PASSWORD}\n")
    (tmp_path / "up").mkdir()
    address = f"redis://127.0.0.1:{redis.port}/0"
    flags = {
        "in the address": ("--redis", address.replace("//", f"//:{PASSWORD}@")),
        "in a file": ("--redis", f"{address}?password_file={tmp_path / 'password'}"),
    }
    try:
        async with running_stack(tmp_path / "up", *flags[way]) as stack:
            assert (await stack.complete(PROMPT)).status == 200
            await stack.indexed(PROMPT)  # indexer and picker have both got in

            assert stack.ready["redis"] == address
            pids = stack.ready["pids"].values()
            assert PASSWORD not in "".join(Path(f"/proc/{pid}/cmdline").read_text() for pid in pids)
            pages = [await (await stack.http.get(f"{stack.ready[page]}/metrics")).text() for page in PAGES]
            assert PASSWORD not in f"{pages} {await stack.state()} {stack.ready}"
            printed = (tmp_path / "up" / "up.log").read_text()
            logs = [path.read_text() for path in Path(LOGS.findall(printed)[0]).glob("*.log")]
            assert len(logs) == len(pids)
            assert PASSWORD not in f"{printed} {logs}"
    finally:
        redis.kill()
