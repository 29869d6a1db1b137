"""Which release of Istio is wired how, and which proxies get it."""

import re

import pytest

from extproc.errors import ConfigError
from extproc.install.istio_release import parse_release, plan_wiring, wiring
from extproc.install.plan import BodyMode, FailureMode, IstioVersion
from extproc.policy.values import Steering
from tests.unit.extproc_install.sample_plans import plan


@pytest.mark.parametrize(
    ("minor", "body", "steering"),
    [
        (24, BodyMode.BUFFERED, Steering.ORIGINAL_DST),
        (25, BodyMode.BUFFERED, Steering.ORIGINAL_DST),
        (26, BodyMode.DUPLEX, Steering.ORIGINAL_DST),
        (27, BodyMode.DUPLEX, Steering.OVERRIDE_HOST),
        (30, BodyMode.DUPLEX, Steering.OVERRIDE_HOST),
        (42, BodyMode.DUPLEX, Steering.OVERRIDE_HOST),
    ],
)
def test_each_release_gets_the_best_that_it_can_do(minor: int, body: BodyMode, steering: Steering) -> None:
    wired = wiring(IstioVersion(minor=minor))
    assert (wired.body_mode, wired.steering) == (body, steering)


def test_fields_appear_with_the_release_that_knows_them() -> None:
    known = {
        minor: (
            wired.route_failure_mode,
            wired.domain_name_match,
            wired.status_on_error,
            wired.route_buffer_limit,
            wired.selected_host_key,
        )
        for minor in (25, 26, 27, 28, 29, 30)
        for wired in [wiring(IstioVersion(minor=minor))]
    }
    assert known == {
        25: (False, False, False, False, False),
        26: (False, True, False, False, False),
        27: (True, True, False, False, False),
        28: (True, True, True, True, False),
        29: (True, True, True, True, False),
        30: (True, True, True, True, True),
    }


@pytest.mark.parametrize(
    ("minor", "body", "oldest"),
    [
        (24, None, "1.24.0"),
        (25, None, "1.24.0"),
        (26, None, "1.26.0"),
        (26, BodyMode.BUFFERED, "1.24.0"),
        (27, None, "1.27.0"),
        (30, None, "1.27.0"),
        (30, BodyMode.BUFFERED, "1.28.0"),
    ],
)
def test_patches_reach_every_proxy_from_the_oldest_that_can_carry_them_on(
    minor: int, body: BodyMode | None, oldest: str
) -> None:
    pattern = re.compile(wiring(IstioVersion(minor=minor), body_mode=body).proxy_version)
    versions = [f"1.{number}.0" for number in range(20, 120)]
    assert [version for version in versions if pattern.match(version)] == versions[versions.index(oldest) :]


@pytest.mark.parametrize("text", ["1.27", "1.27.3", " 1.27 ", "1.27.0-rc.1"])
def test_a_release_may_be_written_with_its_patch_number(text: str) -> None:
    assert parse_release(text) == IstioVersion(minor=27)


@pytest.mark.parametrize("text", ["", "1", "1.x", "2.0", "v1.27", "1.23", "1.9.9", "1.27 or so"])
def test_what_is_no_release_or_too_old_is_refused_with_the_flag_s_name(text: str) -> None:
    with pytest.raises(ConfigError, match="--istio-version"):
        parse_release(text)


def test_a_body_mode_that_the_release_lacks_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--body-mode duplex: Istio 1\.25 cannot"):
        wiring(IstioVersion(minor=25), body_mode=BodyMode.DUPLEX)


def test_failing_open_buffers_bodies_because_duplex_cannot_go_back() -> None:
    assert plan_wiring(plan(failure_mode=FailureMode.FAIL_OPEN)).body_mode is BodyMode.BUFFERED
