"""`kvmesh doctor` without flags: what it finds to check, on real processes, and what it says where there is nothing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from operate.local.ports import pick_free_port
from tests.integration.operate_local.test_processes_up import DEADLINE_SECONDS, HOST, started, until

KUBECONFIG = """apiVersion: v1
kind: Config
clusters: [{name: c, cluster: {server: "http://127.0.0.1:1"}}]
contexts: [{name: c, context: {cluster: c, user: u}}]
users: [{name: u, user: {}}]
current-context: c
"""
# Somebody's own picker, or a Prometheus, may listen at the address that it asks first.
NOBODY = f"http://{HOST}:{pick_free_port(host=HOST, avoid=())}"
DOCTOR = f"""
from operate.doctor import what_to_check
what_to_check.DEFAULT_PICKER = {NOBODY!r}
from operate.cli import main
main()
"""


def doctor(folder: Path, *flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run it where it finds nothing but what is below the folder."""
    (folder / "tmp").mkdir(exist_ok=True)
    kept = {name: value for name, value in os.environ.items() if name not in ("KUBECONFIG", "KUBERNETES_SERVICE_HOST")}
    return subprocess.run(
        [sys.executable, "-c", DOCTOR, "doctor", *flags],
        env={**kept, "TMPDIR": str(folder / "tmp"), "HOME": str(folder), **environment},
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
        check=False,
    )


def test_a_mesh_of_up_is_checked_by_its_pickers_settings(tmp_path: Path) -> None:
    with started(tmp_path) as (process, ready, ports):
        until(lambda: ready.exists() or process.poll() is not None, "the mesh is up")
        assert process.poll() is None, (tmp_path / "output").read_text()
        found = doctor(tmp_path, "-o", "json")
        assert found.returncode == 0, (found.stdout, found.stderr)
        admin = f"http://{HOST}:{ports.admin}"
        assert f"kvmesh doctor: checking by the settings of the picker at {admin} of `kvmesh up`" in found.stderr
        checks = {finding["check"] for finding in json.loads(found.stdout)}
        assert {"same-keys", "picker-tokens", "indexer-findings", "envoy-steering"} <= checks
        # what is given stays
        given = doctor(tmp_path, "--picker", admin, "--no-trial", "--hash-seed", "other", "-o", "json")
        assert given.returncode == 0, given.stdout
        assert "same-keys" not in {finding["check"] for finding in json.loads(given.stdout)}


def test_without_a_mesh_the_cluster_of_the_kubeconfig_is_asked(tmp_path: Path) -> None:
    (tmp_path / "config").write_text(KUBECONFIG)
    asked = doctor(tmp_path, "--timeout-ms", "1000", KUBECONFIG=str(tmp_path / "config"))
    assert asked.returncode == 1
    assert f"checking the cluster of {tmp_path / 'config'}, as with --kubernetes" in asked.stderr
    assert "Traceback" not in asked.stderr


@pytest.mark.parametrize("names_picker", [False, True])
def test_where_nothing_is_there_it_says_what_to_name(tmp_path: Path, names_picker: bool) -> None:
    port = pick_free_port(host=HOST, avoid=())
    (tmp_path / "tmp" / "kvmesh-up-x").mkdir(parents=True)
    (tmp_path / "tmp" / "kvmesh-up-x" / "ready.json").write_text("{")  # of a run that is ending
    asked = doctor(tmp_path, *(("--picker", f"http://{HOST}:{port}") if names_picker else ()))
    assert asked.returncode == 2
    (line,) = asked.stderr.splitlines()
    assert line.startswith(f"kvmesh: no picker answers at {f'http://{HOST}:{port}' if names_picker else NOBODY}")
    assert "name what to check: --picker URL of a running picker, --endpoints IP:PORT" in line
    assert ("no mesh of `kvmesh up`" in line) is not names_picker


def test_what_answers_and_is_no_picker_is_said(tmp_path: Path) -> None:
    with started(tmp_path) as (process, ready, ports):
        until(lambda: ready.exists() or process.poll() is not None, "the mesh is up")
        asked = doctor(tmp_path, "--picker", f"http://{HOST}:{ports.indexer_admin}")
    assert asked.returncode == 2
    assert "answered 404 to GET /v1/settings: it is no picker, or an older one" in asked.stderr


def test_a_mesh_that_wants_a_token_is_not_passed_over(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("0123456789abcdef0123\n")
    with started(tmp_path, "--admin-token-file", str(token)) as (process, ready, _):
        until(lambda: ready.exists() or process.poll() is not None, "the mesh is up")
        (tmp_path / "config").write_text(KUBECONFIG)
        closed = doctor(tmp_path, KUBECONFIG=str(tmp_path / "config"))
        opened = doctor(tmp_path, "--token-file", str(token), "--no-trial", "-o", "json")
    assert closed.returncode == 2
    assert "answered 401 to GET /v1/settings: give --token-file, or --cert" in closed.stderr
    assert "of `kvmesh up`" in opened.stderr
    assert json.loads(opened.stdout)
