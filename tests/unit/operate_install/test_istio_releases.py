"""Which releases of Istio are taken, and which proxies get the patches."""

import re

import pytest

from extproc.errors import ConfigError
from kvmesh.settings import options_of
from operate.install.parse_targets import OLDEST_MINOR, PROXY_VERSIONS, parse_release, planned_body_mode
from operate.install.plan import BodyMode, FailureMode, InstallPlan, IstioVersion
from tests.unit.operate_install.sample_plans import plan


def test_patches_reach_every_proxy_from_the_oldest_release_on() -> None:
    versions = [f"1.{number}.0" for number in range(20, 120)]
    taken = [version for version in versions if re.match(PROXY_VERSIONS, version)]
    assert taken == versions[versions.index(f"1.{OLDEST_MINOR}.0") :]


@pytest.mark.parametrize("text", ["1.28", "1.28.3", " 1.28 ", "1.28.0-rc.1"])
def test_a_release_may_be_written_with_its_patch_number(text: str) -> None:
    assert parse_release(text) == IstioVersion(minor=28)


@pytest.mark.parametrize("text", ["", "1", "1.x", "2.0", "v1.28", "1.28 or so"])
def test_what_is_no_release_is_refused_with_the_flag_s_name(text: str) -> None:
    with pytest.raises(ConfigError, match="--istio-version"):
        parse_release(text)


@pytest.mark.parametrize("text", ["1.9.9", "1.24", "1.27.3"])
def test_a_release_that_is_too_old_is_refused_with_what_to_do(text: str) -> None:
    with pytest.raises(ConfigError, match=r"is too old: kvmesh needs 1\.28 \(Envoy 1\.36\) or newer\. Upgrade Istio"):
        parse_release(text)


def test_failing_open_buffers_bodies_because_duplex_cannot_go_back() -> None:
    assert planned_body_mode(plan()) is BodyMode.DUPLEX
    assert planned_body_mode(plan(failure_mode=FailureMode.FAIL_OPEN)) is BodyMode.BUFFERED
    assert "Default: duplex, or buffered with --failure-mode FailOpen" in options_of(InstallPlan)["body_mode"].help
