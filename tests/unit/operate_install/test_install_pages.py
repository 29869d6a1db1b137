"""Flags, overlays, components, ports and rights of docs/guides/install.md and security.md exist."""

import re
from pathlib import Path

import pytest
import typer

from operate.install.commands import app
from operate.install.render import render
from tests.unit.operate_install.sample_plans import plan
from tools.kustomize_tree import AXES, OVERLAYS

DOCS = Path(__file__).parents[3] / "docs"
INSTALL = (DOCS / "guides" / "install.md").read_text(encoding="utf-8")
SECURITY = (DOCS / "guides" / "security.md").read_text(encoding="utf-8")
OTHERS = {
    "--server-side",
    "--tag",
    "--build-arg",
    "--event-ports",
    "--event-sources",
    "--pod-key-file",
    "--namespaces",
    "--api-key",
    "--tokenizers",
    "--revision",
    "--local-dir",
    "--include",
}  # of kubectl, docker, the roles, vLLM, and hf


def flags() -> set[str]:
    group = typer.main.get_command(app)
    commands = getattr(group, "commands").values()  # noqa: B009 - a group, as it has several commands
    return {name for each in commands for option in each.params for name in [*option.opts, *option.secondary_opts]}


@pytest.mark.parametrize("page", [INSTALL, SECURITY], ids=["install", "security"])
def test_every_flag_that_the_page_names_exists(page: str) -> None:
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", page))
    assert len(named) > 3
    assert named - flags() - OTHERS == set()


def test_every_overlay_and_component_that_the_page_names_exists() -> None:
    components = {f"{axis}-{name}" for axis, names in AXES.items() for name in names}
    assert set(re.findall(r"components/([\w.-]+)", INSTALL)) <= components
    assert {"mesh-wide", "redis-external", "redis-sentinel", "redis-cluster"} <= set(OVERLAYS)


def test_the_table_of_rights_is_what_the_roles_say() -> None:
    table = SECURITY.partition("## Rights")[2].partition("## Supply")[0].lower()
    for each in render(plan()):
        for rule in each.get("rules", ()):
            for name in rule["resources"]:
                assert (name if name != "leases" else "lease `kvmesh-status-writer`") in table
