"""`kvmesh doctor --kubernetes` from outside of a real cluster: it finds the installation, and says how to reach it."""

import json
import os
import subprocess
import sys

import pytest

from tests.mesh.site import COMMAND_SECONDS, Site


@pytest.mark.parametrize("mode", ["gateway", "sidecar", "inferencepool"])
def test_each_part_is_found_with_the_command_that_makes_it_reachable(site: Site, mode: str) -> None:
    namespace = site.pool if mode == "inferencepool" else site.namespace
    flags = {
        "gateway": site.flags(),
        "sidecar": [
            *(each for each in site.flags() if not each.startswith(("--gateway", "--hostname"))),
            "--mode=sidecar",
            f"--clients={site.gateway}@gateway.networking.k8s.io/gateway-name=gateway",
        ],
        "inferencepool": [
            *(each for each in site.flags() if not each.startswith(("--namespace", "--hostname"))),
            "--mode=inferencepool",
            f"--namespace={namespace}",
        ],
    }[mode]
    done = site.call("install", *flags, "--wait-seconds=0")
    assert done.code == 0, done.errors
    asked = subprocess.run(
        [sys.executable, "-m", "operate", "doctor", "--kubernetes", "-o", "json", "--redis=redis://127.0.0.1:1"],
        env=os.environ | {"KUBECONFIG": str(site.kube.kubeconfig)},
        capture_output=True,
        text=True,
        timeout=COMMAND_SECONDS,
        check=False,
    )
    if mode == "inferencepool":
        site.call("uninstall", "--yes", "--settle-seconds=0", f"--namespace={namespace}")
    assert asked.returncode in {1, 2}, asked.stderr
    fixes = {each["subject"]: each["fix"] for each in json.loads(asked.stdout) if each["check"] == "cluster-parts"}
    for component, flag, port in (("picker", "picker", 9090), ("indexer", "indexer", 9091)):
        forward = f"kubectl -n {namespace} port-forward svc/kvmesh-{component} {port}"
        expected = f"run `{forward}` and give --{flag} http://127.0.0.1:{port}"
        assert fixes[f"{namespace}/kvmesh-{component}"] == expected
    # some networks answer at every address: then it is asked for its admin page in vain
    assert f"http://{pod_address(site)}:15000" in asked.stdout


def pod_address(site: Site) -> str:
    path = "-o=jsonpath={.status.podIP}"
    return site.kube.kubectl("get", "pod", "-n", site.gateway, "gateway-1", path).strip()
