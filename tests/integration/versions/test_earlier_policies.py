"""Custom resources that an earlier version took are taken by this one: by the API server's rules, and by the picker."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from extproc.policy.inference_policy import parse_inference_policy
from extproc.policy.merged_policy import pick_policy
from tests.kube_api import kube_api
from tests.kube_api.errors import ApiError
from tools.docs_site import REPOSITORY
from tools.public_surface import definition

RECORDED = sorted(path for path in (REPOSITORY / "tests" / "data" / "versions").iterdir() if path.is_dir())


def policies(version: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((version / "policies.yaml").read_text(encoding="utf-8")))


@pytest.mark.parametrize("version", RECORDED, ids=lambda path: path.name)
async def test_resources_that_are_there_stay_valid_when_the_definition_is_replaced(
    version: Path, tmp_path: Path
) -> None:
    """As an upgrade does it: the old definition with its resources, the new definition over it, the resources again."""
    async with kube_api(tmp_path) as server:
        server.install_crd(yaml.safe_load((version / "definition.yaml").read_text(encoding="utf-8")))
        there = policies(version)
        assert len(there) >= 5
        for number, policy in enumerate(there):
            policy["metadata"] = {"name": f"policy-{number}", "namespace": "default"}
            server.put(policy)
        server.install_crd(definition())
        before = {each["metadata"]["name"]: each["spec"] for each in server.documents("InferencePolicy")}
        for policy in there:
            server.put(policy)  # nothing is refused, and no field is pruned
        after = {each["metadata"]["name"]: each["spec"] for each in server.documents("InferencePolicy")}
        assert before == after
        with pytest.raises(ApiError):
            server.put({**there[0], "spec": {**there[0]["spec"], "scoring": {"strategy": "no-such-strategy"}}})


@pytest.mark.parametrize("version", RECORDED, ids=lambda path: path.name)
def test_the_picker_still_reads_each_of_them(version: Path) -> None:
    for policy in policies(version):
        pick_policy(parse_inference_policy(policy).fields)
