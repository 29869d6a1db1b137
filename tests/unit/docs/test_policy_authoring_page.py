"""What the page shows of `check` and `explain` is what they print."""

import re
from datetime import UTC, datetime
from pathlib import Path

import yaml

from extproc.policy.inference_policy import spec_path
from extproc.policy.merge import leaves_of
from extproc.policy.profiles import PROFILES
from extproc.reach.view import resources_of
from operate.policy.check import Source, check_lines, check_sources
from tests.unit.extproc_reach.mesh_documents import Mesh, inference_pool, pod

DOCS = Path(__file__).parents[3] / "docs"
PAGE = (DOCS / "guides" / "policy-authoring.md").read_text(encoding="utf-8")
PRECEDENCE = (DOCS / "reference" / "policy-precedence.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(?:text)?\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def test_the_merged_policy_is_printed_as_the_page_shows_it() -> None:
    mesh = Mesh()
    policies = list(yaml.safe_load_all(PRECEDENCE.partition("```yaml\n")[2].partition("```")[0]))
    mesh.update(*policies, inference_pool("team-a/llama"), pod("team-a/one", app="llama", ip="10.0.0.1"))
    assert resources_of(mesh.policy.explain("team-a/llama")) in BLOCKS


def test_remarks_are_printed_as_the_page_shows_them() -> None:
    head = "apiVersion: kvmesh.io/v1alpha1\nkind: InferencePolicy\nmetadata: {name: %s, namespace: team-a}\nspec:\n"
    chat = head % "chat" + "  scoring:\n    weights:\n      prefx: 1\n"
    batch = (
        head % "batch"
        + "  priorities:\n    classes:\n    - name: batch\n      priority: -50\n      ttftSeconds: 0.001\n"
    )
    texts = [("policies/chat.yaml", chat), ("policies/batch.yaml", batch)]
    plain = [("policy.yaml", "scoring: {strategy: kv-aware}\n")]
    for given in (texts, plain):
        found = check_sources(
            [Source(name, text.encode()) for name, text in given], root_namespace="istio-system", now=datetime.now(UTC)
        )
        shown = "".join(f"{line}\n" for line in check_lines(found) if given is texts or " note " in line)
        assert shown in BLOCKS, shown


def test_the_table_of_profiles_has_their_fields() -> None:
    rows = dict(re.findall(r"^\| `([a-z]+)` \|.*\| (.*) \|$", PAGE, re.MULTILINE))
    assert rows == {
        profile: ", ".join(f"`{_shown(path, value)}`" for path, value in leaves_of(fields))
        for profile, fields in PROFILES.items()
    }


def _shown(path: tuple[str, ...], value: object) -> str:
    shown = f"{value:g}" if isinstance(value, float) else str(value).lower()
    return f"{spec_path(path).removeprefix('spec.')}: {shown}"
