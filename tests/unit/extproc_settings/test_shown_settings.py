"""What a picker shows of its settings: enough to check a mesh by, and no secret."""

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from extproc.errors import ConfigError
from extproc.policy.merged_policy import pick_policy
from extproc.policy.values import Steering
from extproc.settings.config import PickerSettings
from extproc.settings.shown_settings import ShownSettings, files_of, shown_settings, taken_over, without
from kvmesh.pods.pod_access import PodAccess

SETTINGS = PickerSettings(
    endpoints=("10.0.0.1:8000",),
    model="qwen",
    tokenizer_folder=Path("/models/qwen"),
    grpc_port=1,
    index_timeout_seconds=0.05,
    steering=Steering.ORIGINAL_DST,
    namespaces=frozenset({"b", "a"}),
    pod_access=PodAccess(key_file=Path("/keys/pod")),
    redis_url="rediss://me:s3cret@redis:6379/2?ca_file=/tls/ca.pem",
)


def round_trip(settings: PickerSettings) -> ShownSettings:
    """Return what the admin page of these settings says."""
    return msgspec.json.decode(msgspec.json.encode(shown_settings(settings)), type=ShownSettings)


def test_no_password_is_shown_but_that_there_is_one() -> None:
    shown = round_trip(SETTINGS)
    assert "s3cret" not in repr(shown)
    assert (shown.redis, shown.redis_has_password) == ("rediss://redis:6379/2?ca_file=/tls/ca.pem", True)


def test_a_seed_of_its_own_keys_hashes_in_redis_and_is_not_shown() -> None:
    assert "s33d" not in repr(round_trip(replace(SETTINGS, hash_seed="s33d")))
    with pytest.raises(ConfigError, match="has a --hash-seed of its own, which it does not show: give --hash-seed"):
        taken_over(round_trip(replace(SETTINGS, hash_seed="s33d")), PickerSettings(), given=())
    own = PickerSettings(hash_seed="s33d")
    assert taken_over(round_trip(SETTINGS), own, given={"hash_seed"}).hash_seed == "s33d"
    assert round_trip(replace(SETTINGS, hash_seed=PickerSettings().hash_seed)).hash_seed == "kvmesh"


def test_the_settings_are_taken_over() -> None:
    settings = replace(SETTINGS, redis_url="rediss://redis:6379/2?username=me&password_file=/redis")
    taken = taken_over(round_trip(settings), PickerSettings(), given=())
    assert taken == settings


def test_models_are_taken_over() -> None:
    models = {"served": [{"name": "qwen", "tokens": "text"}]}
    settings = replace(SETTINGS, policy_fields={"models": models})
    taken = taken_over(round_trip(settings), PickerSettings(), given=())
    assert taken.models == pick_policy({"models": models})[1]


@pytest.mark.parametrize(
    ("flag", "kept"),
    [
        ("endpoints", "endpoints"),
        ("redis", "redis_url"),
        ("tokenizer", "tokenizer_folder"),
        ("steering", "steering"),
        ("index_timeout_ms", "index_timeout_seconds"),
        ("pod_key_file", "pod_access"),
        ("namespaces", "namespaces"),
    ],
)
def test_what_is_given_stays(flag: str, kept: str) -> None:
    own = PickerSettings()
    taken = taken_over(round_trip(SETTINGS), own, given={flag})
    assert getattr(taken, kept) == getattr(own, kept)
    assert taken != taken_over(round_trip(SETTINGS), own, given=())


def test_what_a_newer_picker_says_is_refused_in_words() -> None:
    shown = msgspec.structs.replace(round_trip(SETTINGS), steering="by-magic")
    with pytest.raises(ConfigError, match="'by-magic', which this version does not know: give --steering"):
        taken_over(shown, PickerSettings(), given=())
    assert taken_over(shown, PickerSettings(), given={"steering"}).steering is PickerSettings().steering


def test_another_programs_answer_is_no_settings() -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(b"{}", type=ShownSettings)


def test_files_that_are_elsewhere_can_be_left_out() -> None:
    shown = round_trip(SETTINGS)
    files = dict(files_of(shown))
    assert files == {"tokenizer": "/models/qwen", "pod_key_file": "/keys/pod", "redis": "/tls/ca.pem"}
    assert dict(files_of(without(shown, files.values()))) == {}
