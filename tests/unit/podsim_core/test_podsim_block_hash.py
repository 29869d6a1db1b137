import json
from pathlib import Path
from typing import Any

import pytest

from podsim.core.block_hash import NONE_HASH, block_hash, event_hash, extend_chain, none_hash

VECTORS = json.loads((Path(__file__).parents[2] / "data" / "vllm_block_hash_vectors.json").read_text())["vectors"]
BY_NAME = {vector["name"]: vector for vector in VECTORS}
BLOCKS = [vector for vector in VECTORS if vector["inputs"]["hash_algo"] == "sha256" and "token_ids" in vector["inputs"]]
SEEDS = [
    vector for vector in VECTORS if vector["inputs"]["hash_algo"] == "sha256" and "token_ids" not in vector["inputs"]
]


def as_tuples(value: Any) -> Any:
    return tuple(as_tuples(element) for element in value) if isinstance(value, list) else value


def digest_of(vector: dict[str, Any]) -> bytes:
    inputs = vector["inputs"]
    parent = inputs["parent"]
    parent_digest = none_hash(inputs["none_hash_seed"]) if parent == "NONE_HASH" else digest_of(BY_NAME[parent])
    return block_hash(parent_digest, tuple(inputs["token_ids"]), as_tuples(inputs["extra_keys"]))


@pytest.mark.parametrize("vector", SEEDS, ids=lambda vector: vector["name"])
def test_the_parent_of_a_first_block_is_vllms_hash_of_the_seed(vector: dict[str, Any]) -> None:
    assert none_hash(vector["inputs"]["none_hash_seed"]).hex() == vector["expected"]["none_hash_hex"]


@pytest.mark.parametrize("vector", BLOCKS, ids=lambda vector: vector["name"])
def test_block_hashes_are_those_that_vllm_computes(vector: dict[str, Any]) -> None:
    digest = digest_of(vector)
    assert event_hash(digest) == vector["expected"]["event_hash"]
    if "digest_hex" in vector["expected"]:
        assert digest.hex() == vector["expected"]["digest_hex"]


def test_a_long_chain_is_the_same_however_it_is_extended() -> None:
    tokens = [number * 37 % 4000 for number in range(1000)]
    one_by_one: list[bytes] = []
    for block in range(1000 // 16):
        parent = one_by_one[-1] if one_by_one else NONE_HASH
        one_by_one.append(block_hash(parent, tuple(tokens[block * 16 : block * 16 + 16])))
    at_once: list[bytes] = []
    extend_chain(at_once, tokens, block_size=16, tokens=1000)
    in_parts: list[bytes] = []
    for upto in (5, 16, 40, 400, 401, 999, 1000):
        extend_chain(in_parts, tokens, block_size=16, tokens=upto)
    assert at_once == in_parts == one_by_one


def test_a_salt_enters_the_first_block_only_and_so_changes_the_whole_chain() -> None:
    plain: list[bytes] = []
    salted: list[bytes] = []
    extend_chain(plain, range(32), block_size=16, tokens=32)
    extend_chain(salted, range(32), block_size=16, tokens=32, cache_salt="tenant-a")
    assert event_hash(salted[0]) == 12616911002861201973  # vLLM 0.31 and later
    assert salted[1] == block_hash(salted[0], tuple(range(16, 32)))
    assert set(plain).isdisjoint(salted)
