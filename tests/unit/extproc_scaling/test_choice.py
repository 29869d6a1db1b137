"""The cheapest set is that which a search over all sets finds, and equal input has an equal answer."""

import random
from itertools import product

import pytest

from extproc.scaling.choice import KEEP_SHARE, MOST_NODES, Choice, Offer, cheapest, price_of, suffices


def objective(offers: list[Offer], counts: dict[str, int]) -> float:
    kept = sum(offer.price * min(counts[offer.name], offer.held) for offer in offers)
    return price_of(offers, counts) - KEEP_SHARE * kept


def every_set(offers: list[Offer], *, least: int, most: int) -> list[dict[str, int]]:
    ranges = [range(offer.least, (9 if offer.most is None else offer.most) + 1) for offer in offers]
    sets = [{offer.name: n for offer, n in zip(offers, counts, strict=True)} for counts in product(*ranges)]
    return [counts for counts in sets if least <= sum(counts.values()) <= most]


@pytest.mark.parametrize("seed", range(60))
def test_no_other_set_within_the_bounds_is_cheaper(seed: int) -> None:
    draw = random.Random(seed)
    decodes = draw.random() < 0.5
    offers = [
        Offer(
            name=f"v{i}",
            price=draw.uniform(1.0, 9.0),
            prompts=draw.uniform(0.3, 7.0),
            decoding=draw.uniform(0.3, 7.0) if decodes else 0.0,
            least=draw.choice([0, 0, 1]),
            most=draw.choice([None, 4]),
            held=draw.randint(0, 4),
        )
        for i in range(draw.randint(1, 3))
    ]
    least, most, margin = draw.choice([0, 3]), draw.choice([5, 12, 27]), draw.choice([-0.25, 0.0, 0.25])
    found = cheapest(offers, least=least, most=most, margin=margin)
    enough = [counts for counts in every_set(offers, least=least, most=most) if suffices(offers, counts, margin=margin)]
    assert found.suffices == bool(enough)
    if enough:
        assert objective(offers, dict(found.counts)) == pytest.approx(
            min(objective(offers, counts) for counts in enough)
        )


def test_small_pods_fill_what_large_ones_would_leave_idle() -> None:
    # a large pod takes a half of the load and costs 4, a small one an eighth and costs 1.2
    offers = [Offer(name="large", price=4.0, prompts=2.0), Offer(name="small", price=1.2, prompts=8.0)]
    assert cheapest(offers).counts == {"large": 2, "small": 0}
    offers = [Offer(name="large", price=4.0, prompts=2.2), Offer(name="small", price=1.2, prompts=8.8)]
    assert cheapest(offers).counts == {"large": 2, "small": 1}


def test_both_kinds_of_work_are_to_be_done() -> None:
    offers = [
        Offer(name="prompts", price=1.0, prompts=2.0, decoding=20.0),
        Offer(name="decoding", price=1.0, prompts=20.0, decoding=2.0),
    ]
    assert cheapest(offers).counts == {"prompts": 2, "decoding": 2}


def test_what_is_there_is_left_only_where_that_saves_more_than_a_tenth() -> None:
    held = Offer(name="held", price=1.05, prompts=4.0, held=4)
    assert cheapest([held, Offer(name="new", price=1.0, prompts=4.0)]).counts == {"held": 4, "new": 0}
    assert cheapest([held, Offer(name="new", price=0.9, prompts=4.0)]).counts == {"held": 0, "new": 4}


def test_a_variant_that_cannot_keep_a_promise_takes_no_part() -> None:
    offers = [Offer(name="slow", price=0.1, prompts=float("inf")), Offer(name="quick", price=9.0, prompts=3.0)]
    assert cheapest(offers).counts == {"slow": 0, "quick": 3}


def test_where_no_set_suffices_the_largest_is_named_so() -> None:
    offers = [Offer(name="a", price=1.0, prompts=10.0, most=3), Offer(name="b", price=1.0, prompts=5.0, most=2)]
    assert cheapest(offers, most=4) == Choice(counts={"a": 2, "b": 2}, suffices=False)


def test_large_problems_end_and_say_that_they_are_not_proven() -> None:
    draw = random.Random(3)
    offers = [
        Offer(name=f"v{i}", price=draw.uniform(1, 9), prompts=draw.uniform(150, 600), decoding=draw.uniform(150, 600))
        for i in range(8)
    ]
    found = cheapest(offers)
    assert suffices(offers, found.counts)
    alone = [cheapest([offer]) for offer in offers]
    assert price_of(offers, found.counts) <= min(price_of(offers, each.counts) for each in alone)
    assert found == cheapest(offers)
    assert MOST_NODES < 10_000
