"""The files in manifests/ are those that the renderer makes, and patches do what they are made for."""

import copy
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tools.kustomize_tree import json_patch, manifests, write

FOLDER = Path(__file__).parents[3] / "manifests"
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(0, 3) | st.sampled_from(["a", "b/c", "d~e"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["a", "b/c", "~1"]), inner, max_size=3),
    max_leaves=12,
)


def test_the_files_are_those_that_the_renderer_makes() -> None:
    """If this fails: python -m tools.kustomize_tree manifests."""
    files = manifests()
    on_disk = {str(path.relative_to(FOLDER)): path for path in FOLDER.rglob("*.yaml")}
    made_elsewhere = {name for name in on_disk if name.startswith(("crds/", "monitoring/")) and name not in files}
    assert set(on_disk) - made_elsewhere == set(files)
    stale = [name for name, text in files.items() if on_disk[name].read_text(encoding="utf-8") != text]
    assert stale == []


def test_writing_again_removes_what_is_no_longer_made(tmp_path: Path) -> None:
    leftover = tmp_path / "overlays" / "gone" / "kustomization.yaml"
    leftover.parent.mkdir(parents=True)
    leftover.write_text("kind: Kustomization\n", encoding="utf-8")
    write(tmp_path)
    assert not leftover.exists()
    assert (tmp_path / "kvmesh.yaml").is_file()


@settings(max_examples=300)
@given(old=VALUES, new=VALUES)
def test_a_patch_turns_the_old_value_into_the_new_one(old: Any, new: Any) -> None:
    patched = {"root": copy.deepcopy(old)}
    for operation in json_patch({"root": old}, {"root": new}):
        follow(patched, operation)
    assert patched == {"root": new}


def follow(document: Any, operation: dict[str, Any]) -> None:
    """Apply one operation, as RFC 6902 says."""
    *path, last = [part.replace("~1", "/").replace("~0", "~") for part in operation["path"].split("/")[1:]]
    place = document
    for part in path:
        place = place[int(part)] if isinstance(place, list) else place[part]
    if isinstance(place, list):
        match operation["op"]:
            case "add":
                assert last == "-"
                place.append(copy.deepcopy(operation["value"]))
            case "remove":
                del place[int(last)]
            case _:
                place[int(last)] = copy.deepcopy(operation["value"])
    elif operation["op"] == "remove":
        del place[last]
    else:
        place[last] = copy.deepcopy(operation["value"])
