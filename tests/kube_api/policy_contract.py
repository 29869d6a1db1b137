"""Whether an API server judges damaged policies as `schemas.admit` does, which the fast tests rely on.

A subclass named Test… provides the fixture `rest`. All writes are dry runs; the definition stays where it was before.
"""

import json
import random
import secrets
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import yaml

from tests.kube_api.contract import CRDS, eventually
from tests.kube_api.errors import Document
from tests.kube_api.rest import Rest
from tests.kube_api.schemas import admit
from tests.unit.extproc_policy.policy_documents import WHOLE
from tests.unit.extproc_policy.policy_mutations import mutated

MOST_SECONDS = 600
_FILE = Path(__file__).parents[2] / "manifests/crds/kvmesh.io_inferencepolicies.yaml"


class PolicyContract:
    """What the definition of InferencePolicy lets through."""

    mutations = 300

    @pytest.fixture
    async def policies(self, rest: Rest) -> AsyncIterator[str]:
        """The path of policies in a new namespace, with our definition installed."""
        definition = yaml.safe_load(_FILE.read_text())
        installed = await rest.ask("POST", CRDS, definition)
        assert installed.code in {201, 409}, installed.document
        name = f"kvmesh-policies-{secrets.token_hex(4)}"
        await rest.ask(
            "POST", "/api/v1/namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
        )
        path = f"/apis/kvmesh.io/v1alpha1/namespaces/{name}/inferencepolicies"

        async def served() -> bool:
            return (await rest.ask("GET", path)).code == 200

        try:
            await eventually(served)
            yield path
        finally:
            await rest.ask("DELETE", f"/api/v1/namespaces/{name}")
            if installed.code == 201:
                await self._remove(rest, f"{CRDS}/{definition['metadata']['name']}")

    @staticmethod
    async def _remove(rest: Rest, definition: str) -> None:
        """Until it is gone: whoever installs it next must not meet the one that goes."""
        await rest.ask("DELETE", definition)

        async def gone() -> bool:
            return (await rest.ask("GET", definition)).code == 404

        await eventually(gone)

    @pytest.mark.timeout(MOST_SECONDS)
    async def test_damaged_policies_are_judged_as_our_tests_judge_them(self, rest: Rest, policies: str) -> None:
        schema = yaml.safe_load(_FILE.read_text())["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
        chance, whole = random.Random(6), json.dumps(WHOLE["spec"])
        judged: list[tuple[Document, int, int]] = []
        for _ in range(self.mutations):
            metadata = {"name": "a", "namespace": policies.split("/")[5]}
            document = {**WHOLE, "metadata": metadata, "spec": mutated(whole, chance)}
            answer = await rest.ask("POST", f"{policies}?dryRun=All", document)
            judged.append((document["spec"], answer.code, 422 if admit(schema, document).causes else 201))
        assert [one for one in judged if one[1] != one[2]] == []
        assert {code for _, code, _ in judged} == {201, 422}
