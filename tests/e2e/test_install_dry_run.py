"""`kvmesh install --dry-run` as typed: istiod of that release takes what it prints, and so does a real Envoy."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from extproc.install.commands import app
from extproc.install.plan import Mode
from tests.istiod.apply import apply_envoy_filters
from tests.istiod.base import Proxy
from tests.istiod.bootstrap import bootstrap, refusal_of
from tests.istiod.filters import documents_of
from tests.istiod.installs import PICKER, PODS, Installation
from tests.istiod.releases import RELEASES

FLAGS = {
    "gateway": ("--gateway", "istio-ingress/inference-gateway", "--hostname", "llm.example.com"),
    "sidecar": ("--clients", "llm-clients"),
    "ambient-gateway": ("--gateway", "llm/inference-gateway", "--hostname", "models.llm"),
}


def dry_run(*flags: str) -> list[dict[str, Any]]:
    """Return the documents that the command prints."""
    result = CliRunner().invoke(
        app, ["install", "--dry-run", "--image=kvmesh:test", "--pool", "llm/vllm-llama:8000", *flags]
    )
    assert result.exit_code == 0, result.output
    return [document for document in yaml.safe_load_all(result.stdout) if document is not None]


def base(mode: str, release: str, documents: list[dict[str, Any]]) -> Proxy:
    """Return the proxy's configuration with the printed DestinationRules."""
    installation = Installation(minor=RELEASES[release].minor, mode=Mode(mode))
    return installation.base(rules=documents_of(documents, "DestinationRule"))


@pytest.mark.parametrize("release", ["1.24", "1.26", "1.27", "1.30"])
@pytest.mark.parametrize("mode", FLAGS)
async def test_what_the_command_prints_is_a_configuration_that_a_real_envoy_takes(
    mode: str, release: str, tmp_path: Path
) -> None:
    documents = dry_run("--istio-version", release, "--mode", mode, *FLAGS[mode])

    applied = apply_envoy_filters(
        base(mode, release, documents), documents_of(documents, "EnvoyFilter"), release=RELEASES[release]
    )

    assert applied.outcomes
    assert (applied.unmatched(), applied.dropped()) == ([], {})
    endpoints = {PODS.cluster: ["127.0.0.1:1"], PICKER.cluster: ["127.0.0.1:2"]}
    assert await refusal_of(bootstrap(applied.proxy, endpoints=endpoints), tmp_path) is None


@pytest.mark.parametrize("release", ["1.24", "1.26"])
@pytest.mark.parametrize("rules_of", [None, "1.27"])
async def test_filters_whose_rules_are_not_there_yet_or_no_more_are_taken_too(
    release: str, rules_of: str | None, tmp_path: Path
) -> None:
    """Installing applies them one after the other, and an upgrade past 1.26 has the new rules first."""
    filters = documents_of(dry_run("--istio-version", release, *FLAGS["gateway"]), "EnvoyFilter")
    rules = dry_run("--istio-version", rules_of, *FLAGS["gateway"]) if rules_of else []

    applied = apply_envoy_filters(base("gateway", release, rules), filters, release=RELEASES[release])

    assert applied.unmatched() == []
    endpoints = {PODS.cluster: ["127.0.0.1:1"], PICKER.cluster: ["127.0.0.1:2"]}
    assert await refusal_of(bootstrap(applied.proxy, endpoints=endpoints), tmp_path) is None
