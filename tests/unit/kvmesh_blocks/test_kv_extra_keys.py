"""Separating adapter, salt and block features."""

from typing import Any

import pytest

from kvmesh.blocks.block_keys import (
    ExtraKeys,
    UnknownExtraKeyError,
    fold_features,
    held_digest,
    held_name,
    separate_extra_keys,
)

IMAGE = ("mm-1", 0)


def test_no_extra_keys_are_nothing() -> None:
    assert separate_extra_keys(None, lora_name=None, starts_prompt=True) == ExtraKeys(cache_salt=None, folded=None)
    assert separate_extra_keys([None, None], lora_name=None, starts_prompt=True).folded is None


def test_the_adapter_is_stripped_from_every_block() -> None:
    assert separate_extra_keys([("ad",), ("ad", IMAGE)], lora_name="ad", starts_prompt=True) == ExtraKeys(
        cache_salt=None, folded=(None, fold_features([IMAGE]))
    )


def test_the_salt_is_taken_from_the_first_block_of_a_prompt() -> None:
    assert separate_extra_keys([(IMAGE, "s"), None], lora_name=None, starts_prompt=True) == ExtraKeys(
        cache_salt="s", folded=(fold_features([IMAGE]), None)
    )


def test_a_salt_that_equals_the_adapter_is_still_a_salt() -> None:
    assert separate_extra_keys([("ad", "ad")], lora_name="ad", starts_prompt=True).cache_salt == "ad"
    assert separate_extra_keys([("ad",)], lora_name="ad", starts_prompt=True).cache_salt is None
    assert separate_extra_keys([("ad",)], lora_name=None, starts_prompt=True).cache_salt == "ad"


def test_a_bare_string_later_in_a_prompt_is_an_item() -> None:
    assert separate_extra_keys([("mm-1",)], lora_name=None, starts_prompt=False) == ExtraKeys(
        cache_salt=None, folded=(fold_features(["mm-1"]),)
    )


def test_different_features_never_share_an_encoding() -> None:
    features: list[list[Any]] = [[("a", 1)], [("a", 2)], [("a1", 0)], ["a"], [b"a"], ["a", "b"], ["ab"], [("a", -1)]]

    assert len({fold_features(each) for each in features}) == len(features)
    assert fold_features([]) is None


def test_tagged_values_mean_what_plain_ones_do() -> None:
    tagged = [(("lora", "ad", "/adapters/ad"), ("mm", "mm-1", 0), ("cache_salt", "s"), ("prompt_embeds", b"\1"))]
    plain = [("ad", IMAGE, "s", b"\1")]

    assert separate_extra_keys(tagged, lora_name="ad", starts_prompt=True) == separate_extra_keys(
        plain, lora_name="ad", starts_prompt=True
    )
    assert separate_extra_keys([(("cache_salt", "ad"),)], lora_name=None, starts_prompt=True).cache_salt == "ad"


@pytest.mark.parametrize("entry", [(("lora", "other", "/a"),), (("mm", "mm-1"),), (("mm", "mm-1", "0"),)])
def test_a_tagged_value_that_fits_nothing_is_refused(entry: tuple[Any, ...]) -> None:
    with pytest.raises(UnknownExtraKeyError):
        separate_extra_keys([entry], lora_name="ad", starts_prompt=True)


def test_a_salt_belongs_to_the_first_block_alone() -> None:
    with pytest.raises(UnknownExtraKeyError):
        separate_extra_keys([(("cache_salt", "s"),)], lora_name=None, starts_prompt=False)


@pytest.mark.parametrize("feature", [7, None, ("a", "b"), ("a", True), ("a", 1, 2), ("a", 1 << 63)])
def test_an_unknown_feature_is_refused_rather_than_ignored(feature: object) -> None:
    with pytest.raises(UnknownExtraKeyError):
        fold_features([feature])


def test_long_features_fold_to_what_their_held_forms_do() -> None:
    name, digest = "i" * 900_000, b"d" * 900_000
    for long, held in [
        ((name, 3), (held_name(name), 3)),
        (("mm", name, 3), ("mm", held_name(name), 3)),
        (name, held_name(name)),
        (digest, held_digest(digest)),
    ]:
        folded = fold_features([long])
        assert folded == fold_features([held])
        assert folded is not None
        assert len(folded) < 300
