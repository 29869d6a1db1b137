"""The commands of the pages, run as they stand there: only addresses and files are this machine's.

tests/docs_commands/listed.yaml says which, and what each must print. A page's commands run in their order and in one
folder; a server that a page starts is what its later commands ask.
"""

import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import pytest
import pytest_asyncio

from tests.docs_commands.listed import Listed, entry_of, read_list, to_list
from tests.docs_commands.pages import Command
from tests.docs_commands.parsing import programs
from tests.e2e.page_mesh import (
    SERVERS,
    PoolsPicker,
    environment,
    place_of,
    pools_picker,
    put_certificates,
    redis_of_the_page,
    write_audit,
)
from tests.e2e.stack import END_SECONDS, START_SECONDS, Stack, eventually, free_mesh_ports, running_stack
from tests.required_programs import lacks
from tools.docs_site import REPOSITORY

ENTRIES = read_list()
BY_THEMSELVES = ("make demo",)


def to_run() -> dict[str, list[tuple[Command, Listed]]]:
    """Return the commands to run by page, in the page's order."""
    found: dict[str, list[tuple[Command, Listed]]] = {}
    for command in to_list():
        entry = entry_of(command, ENTRIES)
        if entry is not None and entry.treatment == "run" and command.line not in BY_THEMSELVES:
            found.setdefault(command.page, []).append((command, entry))
    return found


TO_RUN = to_run()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Stack, PoolsPicker]]:
    """A mesh of two pods, and a picker that serves the pools of the pages on them."""
    async with (
        running_stack(tmp_path_factory.mktemp("mesh"), pods=2) as stack,
        pools_picker(tmp_path_factory.mktemp("pools"), stack) as pools,
    ):
        yield stack, pools


@pytest.mark.parametrize("page", TO_RUN)
@pytest.mark.asyncio(loop_scope="module")
async def test_the_commands_of_a_page_do_what_it_says(
    page: str, mesh: tuple[Stack, PoolsPicker], tmp_path: Path
) -> None:
    lacking = {
        words[0] for command, _ in TO_RUN[page] for words in programs(command.line) if words[0] in {"jq", "yq", "curl"}
    }
    lacking = {program for program in lacking if shutil.which(program) is None}
    if lacking:
        lacks(f"needs {', '.join(sorted(lacking))}")
    stack, pools = mesh
    async with AsyncExitStack() as held:
        place = await held.enter_async_context(place_of(page, tmp_path, stack=stack, pools=pools))
        if page == "docs/guides/admin-access.md":
            put_certificates(tmp_path)
        if page == "docs/guides/audit.md":
            await write_audit(place)
        if page == "docs/guides/redis-connection.md":
            (tmp_path / "redis").mkdir()
            await held.enter_async_context(redis_of_the_page(tmp_path / "redis", place.addresses))
        for command, entry in TO_RUN[page]:
            server = SERVERS.search(command.line)
            if re.match(r"\w+=", command.line):
                place.assignments.append(command.line)
            elif server is not None:
                await place.serve(command.line, server[1], says=entry.text)
            else:
                is_install = "kvmesh install" in command.line and "--dry-run" not in command.line
                again = partial(place.run, command.line, also="--dry-run" if is_install else "")
                await eventually(again, partial(says, entry.text))


def says(text: str, printed: str) -> bool:
    return text in printed


async def test_make_demo_starts_a_mesh_whose_lines_to_copy_work(tmp_path: Path) -> None:
    """As a person does it: `make demo`, the `curl` lines that it prints, Ctrl-C."""
    installed = REPOSITORY / ".venv" / ".installed"
    if shutil.which("make") is None or not installed.exists():
        lacks("needs make, and what `make install` has made")
    ready, log = tmp_path / "ready.json", tmp_path / "log"
    arguments = f"--no-live --pods 1 --ready-file {ready} --port-base {free_mesh_ports(1)}"
    # -o: what is installed stays as it is
    command = ["make", "--no-print-directory", "-o", ".venv/.installed", "demo", f"ARGS={arguments}"]
    with log.open("wb") as output:
        demo = subprocess.Popen(
            command, cwd=REPOSITORY, env=environment(tmp_path), stdout=output, stderr=output, start_new_session=True
        )
    try:

        async def is_up() -> bool:
            assert demo.poll() is None, log.read_text()
            return ready.exists() and log.read_text().count("\ncurl ") >= 3

        await eventually(is_up, bool, seconds=START_SECONDS)
        assert "kvmesh is up" in log.read_text()
        lines = re.findall(r"^curl .*$", log.read_text(), re.MULTILINE)
        answers = [
            subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True, timeout=END_SECONDS).stdout
            for line in lines
        ]
        pod = json.loads(ready.read_text())["endpoints"][0]
        assert all(f"x-kvmesh-upstream: {pod}" in answer for answer in answers)
        assert re.search(r'"cached_tokens": ?[1-9]', answers[1])
    finally:
        os.killpg(demo.pid, signal.SIGINT)
        demo.wait(END_SECONDS)
