"""Which layer wins which field."""

import random
from collections.abc import Mapping
from itertools import permutations
from typing import Any

from extproc.policy.merge import Layer, Level, Loss, Merged, Path, leaves_of, merge_layers, precedence


def resets(path: Path) -> tuple[Path, ...]:
    return (("policy", "weights"),) if path == ("policy", "strategy") else ()


def layer(
    source: str, level: Level, fields: Mapping[str, Any], *, created_at: str | None = "2026-01-01T00:00:00Z"
) -> Layer:
    return Layer(source=source, level=level, created_at=created_at, fields=fields)


def merged(*layers: Layer) -> Merged:
    return merge_layers(layers, resets=resets)


def test_each_level_wins_over_all_less_specific_ones_field_by_field() -> None:
    levels = list(Level)
    layers = [
        layer(f"a/{level.name}", level, {"policy": {f"field_{i}": level.name for i in range(level + 1)}})
        for level in levels
    ]
    random.Random(1).shuffle(layers)
    assert merged(*layers).fields == {"policy": {f"field_{level}": "POOL" for level in levels}}
    assert merged(*layers[:0]) == Merged(fields={}, origins={}, losses=())


def test_the_fields_that_only_one_layer_gives_keep_their_origin() -> None:
    outcome = merged(
        layer("root/mesh", Level.MESH, {"policy": {"fallbacks": 1, "scales": {"queue_requests": 4}}}),
        layer("a/own", Level.POOL, {"policy": {"scales": {"active_requests": 2}}, "failure_mode": "FailOpen"}),
    )
    assert outcome == Merged(
        fields={
            "policy": {"fallbacks": 1, "scales": {"queue_requests": 4, "active_requests": 2}},
            "failure_mode": "FailOpen",
        },
        origins={
            ("policy", "fallbacks"): "root/mesh",
            ("policy", "scales", "queue_requests"): "root/mesh",
            ("policy", "scales", "active_requests"): "a/own",
            ("failure_mode",): "a/own",
        },
        losses=(),
    )


def test_within_one_level_the_oldest_wins_and_the_younger_one_has_a_conflict() -> None:
    outcome = merged(
        layer(
            "a/young",
            Level.NAMESPACE,
            {"policy": {"fallbacks": 3, "session_seconds": 5}},
            created_at="2026-02-01T00:00:00Z",
        ),
        layer("a/old", Level.NAMESPACE, {"policy": {"fallbacks": 1}}, created_at="2026-01-01T00:00:00Z"),
    )
    assert outcome.fields == {"policy": {"fallbacks": 1, "session_seconds": 5}}
    assert outcome.losses == (Loss(loser="a/young", winner="a/old", path=("policy", "fallbacks"), is_conflict=True),)


def test_of_the_same_age_the_first_by_name_wins() -> None:
    layers = [layer(f"a/{name}", Level.POOL, {"failure_mode": name}) for name in "cab"]
    assert merged(*layers).origins == {("failure_mode",): "a/a"}


def test_a_policy_without_creation_time_displaces_no_policy_that_has_one() -> None:
    outcome = merged(
        layer("a/a-file", Level.POOL, {"failure_mode": "FailOpen"}, created_at=None),
        layer("a/resource", Level.POOL, {"failure_mode": "FailClose"}),
    )
    assert outcome.origins == {("failure_mode",): "a/resource"}


def test_the_same_value_is_neither_a_conflict_nor_overridden() -> None:
    outcome = merged(
        layer("root/mesh", Level.MESH, {"failure_mode": "FailOpen"}),
        layer("a/a", Level.POOL, {"failure_mode": "FailOpen"}),
        layer("a/b", Level.POOL, {"failure_mode": "FailOpen"}),
    )
    assert (outcome.origins, outcome.losses) == ({("failure_mode",): "a/a"}, ())


def test_who_loses_to_a_more_specific_layer_has_no_conflict_though_a_peer_would_have_won() -> None:
    outcome = merged(
        layer("a/old", Level.NAMESPACE, {"failure_mode": "FailOpen"}, created_at="2025-01-01T00:00:00Z"),
        layer("a/young", Level.NAMESPACE, {"failure_mode": "FailClose"}),
        layer("a/pool", Level.POOL, {"failure_mode": "neither"}),
    )
    assert {(loss.loser, loss.winner, loss.is_conflict) for loss in outcome.losses} == {
        ("a/old", "a/pool", False),
        ("a/young", "a/pool", False),
    }


def test_classes_merge_by_name_and_their_lists_are_taken_whole() -> None:
    outcome = merged(
        layer(
            "root/mesh",
            Level.MESH,
            {
                "policy": {
                    "priorities": {
                        "classes": {
                            "gold": {"priority": 100, "degrade": [{"step": "reject"}]},
                            "batch": {"priority": -5},
                        }
                    }
                }
            },
        ),
        layer("a/own", Level.NAMESPACE, {"policy": {"priorities": {"classes": {"gold": {"degrade": []}, "team": {}}}}}),
    )
    assert outcome.fields["policy"]["priorities"]["classes"] == {
        "gold": {"priority": 100, "degrade": []},
        "batch": {"priority": -5},
        "team": {},
    }
    assert outcome.origins["policy", "priorities", "classes", "team"] == "a/own"
    assert [loss.path[-2:] for loss in outcome.losses] == [("gold", "degrade")]


def test_an_empty_mapping_declares_a_name_and_takes_nothing_away() -> None:
    below = layer("root/mesh", Level.MESH, {"classes": {"gold": {"priority": 1}}})
    above = layer("a/own", Level.POOL, {"classes": {"gold": {}}})
    assert merged(below, above).fields == {"classes": {"gold": {"priority": 1}}}
    assert merged(below, above).losses == ()
    below, above = (
        layer("root/mesh", Level.MESH, {"classes": {"gold": {}}}),
        layer("a/own", Level.POOL, {"classes": {"gold": {"priority": 1}}}),
    )
    assert merged(below, above).fields == {"classes": {"gold": {"priority": 1}}}
    assert merged(below, above).losses == ()


def test_a_strategy_starts_from_its_own_weights_not_from_what_others_made_of_another_strategy() -> None:
    outcome = merged(
        layer("root/mesh", Level.MESH, {"policy": {"strategy": "kv-aware", "weights": {"session": 3}}}),
        layer("a/own", Level.POOL, {"policy": {"strategy": "round-robin", "weights": {"turn": 2}}}),
    )
    assert outcome.fields == {"policy": {"strategy": "round-robin", "weights": {"turn": 2}}}
    assert {(loss.path, loss.winner) for loss in outcome.losses} == {
        (("policy", "strategy"), "a/own"),
        (("policy", "weights", "session"), "a/own"),
    }


def test_weights_of_more_specific_layers_correct_the_strategy_of_wider_ones() -> None:
    outcome = merged(
        layer("root/mesh", Level.MESH, {"policy": {"strategy": "kv-aware", "weights": {"session": 3}}}),
        layer("a/own", Level.POOL, {"policy": {"weights": {"lora": 1}}}),
    )
    assert outcome.fields == {"policy": {"strategy": "kv-aware", "weights": {"session": 3, "lora": 1}}}


def test_the_order_in_which_layers_come_does_not_matter() -> None:
    chance = random.Random(7)
    layers = [_random_layer(chance, i) for i in range(4)]
    outcomes = [merged(*order) for order in permutations(layers)]
    assert all(outcome == outcomes[0] for outcome in outcomes)


def test_a_thousand_random_merges_obey_the_rule_leaf_by_leaf() -> None:
    chance = random.Random(3)
    for _ in range(1000):
        layers = [_random_layer(chance, i) for i in range(chance.randint(1, 6))]
        outcome = merge_layers(layers, resets=lambda _: ())
        for path in {path for each in layers for path, _ in leaves_of(each.fields)}:
            claims = [(each, value) for each in layers for its, value in leaves_of(each.fields) if its == path]
            winner, value = min(claims, key=lambda claim: precedence(claim[0]))
            assert outcome.origins[path] == winner.source
            assert dict(leaves_of(outcome.fields))[path] == value
            losers = {each.source for each, theirs in claims if theirs != value}
            assert {loss.loser for loss in outcome.losses if loss.path == path} == losers


def _random_layer(chance: random.Random, i: int) -> Layer:
    fields: dict[str, Any] = {}
    for _ in range(chance.randint(0, 8)):
        place = fields
        for depth in range(chance.randint(0, 2)):  # names by depth, so that no leaf is elsewhere a mapping
            place = place.setdefault(f"m{depth}{chance.randint(0, 1)}", {})
        place[f"leaf{chance.randint(0, 2)}"] = chance.choice([0, 1, [1], [2, 3], "text"])
    return layer(
        f"a/{i}",
        chance.choice(list(Level)),
        fields,
        created_at=chance.choice([None, "2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z"]),
    )
