"""The cheapest sufficient set of pods of several variants: a small integer program, solved exactly. Pure.

If n pods of a variant would carry the load alone, one of them takes 1/n of it. A set suffices if these shares add up
to 1 for both prompts and decoding. n already includes the safety margin for random peaks, so a mixed set has slightly
more margin than it needs.

The search is branch and bound: a lower bound on the cost of the missing shares, over the remaining variants, prunes
a branch. Ties go to the set with the fewest changes, then to the first in the order of variants, so that equal input
gives an equal answer.
"""

from collections.abc import Mapping, Sequence
from math import ceil, inf

import msgspec

KEEP_SHARE = 0.1  # of a pod's price: present pods are replaced only if that saves more
MOST_NODES = 2000  # a few milliseconds; then the best set so far is returned
MIXES = tuple(i / 8 for i in range(9))  # weights of prompts versus decoding, for the lower bound
NEARLY = 1e-9


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """One variant, as the search needs it."""

    name: str
    price: float  # of a pod hour
    prompts: float = 0.0  # pods for all prompts if it served alone; 0: there are no prompts; inf: it cannot serve them
    decoding: float = 0.0  # the same for decoding
    least: int = 0
    most: int | None = None
    held: int = 0  # pods desired now

    @property
    def is_useless(self) -> bool:
        """Whether its pods can take no share of the load."""
        return max(self.prompts, self.decoding) == inf and not any(self.shares())

    def shares(self) -> tuple[float, float]:
        """Return one pod's shares of the prompts and of the decoding; 0 also if there is no such work."""
        return (1.0 / self.prompts if self.prompts else 0.0), (1.0 / self.decoding if self.decoding else 0.0)


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """The number of pods of each variant."""

    counts: Mapping[str, int]
    suffices: bool = True  # False: no set within the bounds suffices; this is the largest
    is_proven: bool = True  # False: the search stopped at `MOST_NODES`


def price_of(offers: Sequence[Offer], counts: Mapping[str, int]) -> float:
    """Return the cost of a set per hour."""
    return sum(offer.price * counts.get(offer.name, 0) for offer in offers)


def suffices(offers: Sequence[Offer], counts: Mapping[str, int], *, margin: float = 0.0) -> bool:
    """Tell whether a set carries the load plus `margin` pods of the smallest variant (minus, if negative)."""
    needed = _needed(offers, margin)
    for kind in range(2):
        taken = sum(offer.shares()[kind] * counts.get(offer.name, 0) for offer in offers)
        if taken < needed[kind] - NEARLY:
            return False
    return True


def cheapest(offers: Sequence[Offer], *, least: int = 0, most: int | None = None, margin: float = 0.0) -> Choice:
    """Return the cheapest set of `least` to `most` pods in total that `suffices` with this margin."""
    search = _Search(offers, needed=_needed(offers, margin), least=least, most=most)
    search.run()
    if search.best is None:
        return Choice(counts=_largest(offers, most), suffices=False)
    return Choice(
        counts=dict(zip((offer.name for offer in search.offers), search.best, strict=True)),
        is_proven=search.nodes <= MOST_NODES,
    )


def _needed(offers: Sequence[Offer], margin: float) -> tuple[float, float]:
    """Return the shares of prompts and decoding that a set must take: 0 if there is no such work."""
    needed = []
    for kind in range(2):
        shares = [share for offer in offers if (share := offer.shares()[kind]) > 0.0]
        there_is = any((offer.prompts, offer.decoding)[kind] for offer in offers)
        needed.append(max(1.0 + margin * min(shares, default=0.0), NEARLY) if there_is else 0.0)
    return needed[0], needed[1]


def _largest(offers: Sequence[Offer], most: int | None) -> dict[str, int]:
    """Return the set within the bounds that takes most of the load: variants with the largest shares first."""
    counts = {offer.name: offer.least for offer in offers}
    room = inf if most is None else most - sum(counts.values())
    needed = _needed(offers, 0.0)
    missing = [max(needed[kind] - sum(o.shares()[kind] * counts[o.name] for o in offers), 0.0) for kind in range(2)]

    def taken(offer: Offer) -> float:
        return min((share for share, lacks in zip(offer.shares(), missing, strict=True) if lacks), default=0.0)

    for offer in sorted(offers, key=lambda each: (-taken(each), each.price, each.name)):
        if taken(offer) <= 0.0:
            continue
        more = min(room, inf if offer.most is None else offer.most - offer.least, ceil(1.0 / taken(offer)))
        counts[offer.name] += max(int(more), 0)
        room -= max(more, 0)
    return counts


class _Search:
    """One search; `best` has the counts in the order of `offers`."""

    def __init__(self, offers: Sequence[Offer], *, needed: tuple[float, float], least: int, most: int | None) -> None:
        self.offers = list(offers)
        self.nodes = 0
        self.best: tuple[int, ...] | None = None
        self._rank: tuple[float, int] = (inf, 0)
        self._needed, self._least, self._most = needed, least, inf if most is None else most
        self._shares = [offer.shares() for offer in self.offers]
        kept = [offer.price * (1.0 - (KEEP_SHARE if offer.held else 0.0)) for offer in self.offers]
        self._price_of_a_share = [self._cheapest_share(kept, i) for i in range(len(self.offers) + 1)]
        self._cheapest_pod = [min(kept[i:], default=inf) for i in range(len(self.offers) + 1)]
        self._least_left = [sum(offer.least for offer in self.offers[i:]) for i in range(len(self.offers) + 1)]

    def run(self) -> None:
        for i in range(len(self.offers)):
            self._try_alone(i)
        self._branch(0, (), 0.0, 0, 0, self._needed)

    def _try_alone(self, i: int) -> None:
        """Try one variant with all others at their minimum: a first set to beat."""
        counts = [offer.least for offer in self.offers]
        missing = [
            needed - sum(share[kind] * count for share, count in zip(self._shares, counts, strict=True))
            for kind, needed in enumerate(self._needed)
        ]
        shares, most = self._shares[i], self.offers[i].most
        if any(lacks > NEARLY and not share for lacks, share in zip(missing, shares, strict=True)):
            return
        more = [ceil(lacks / share - NEARLY) for lacks, share in zip(missing, shares, strict=True) if share]
        counts[i] += max([*more, self._least - sum(counts), 0])
        if sum(counts) <= self._most and (most is None or counts[i] <= most):
            pairs = list(zip(self.offers, counts, strict=True))
            cost = sum(self._cost(offer, count) for offer, count in pairs)
            self._found(tuple(counts), cost, sum(abs(count - offer.held) for offer, count in pairs))

    def _found(self, counts: tuple[int, ...], cost: float, changes: int) -> None:
        is_cheaper, is_equal = cost < self._rank[0] - NEARLY, cost < self._rank[0] + NEARLY
        if is_cheaper or (is_equal and (changes, counts) < (self._rank[1], self.best or ())):
            self.best, self._rank = counts, (cost, changes)

    def _cheapest_share(self, prices: Sequence[float], first: int) -> tuple[float, ...]:
        """Return a lower bound on the price of a whole share from variant `first` on, for each of `MIXES`."""
        return tuple(
            min(
                (
                    price / (mix * prompts + (1.0 - mix) * decoding)
                    for price, (prompts, decoding) in zip(prices[first:], self._shares[first:], strict=True)
                    if mix * prompts + (1.0 - mix) * decoding > 0.0
                ),
                default=inf,
            )
            for mix in MIXES
        )

    def _cost(self, offer: Offer, count: int) -> float:
        return offer.price * count - KEEP_SHARE * offer.price * min(count, offer.held)

    def _branch(
        self, i: int, counts: tuple[int, ...], cost: float, pods: int, changes: int, missing: tuple[float, float]
    ) -> None:
        self.nodes += 1
        if self.nodes > MOST_NODES and self.best is not None:
            return
        if cost + self._bound(i, missing, self._least - pods) > self._rank[0] + NEARLY:
            return
        if i == len(self.offers):
            if max(missing) <= NEARLY and self._least <= pods <= self._most:
                self._found(counts, cost, changes)
            return
        offer, shares = self.offers[i], self._shares[i]
        for count in self._counts(i, pods, missing):
            left = missing[0] - count * shares[0], missing[1] - count * shares[1]
            more = self._cost(offer, count)
            self._branch(i + 1, (*counts, count), cost + more, pods + count, changes + abs(count - offer.held), left)

    def _bound(self, i: int, missing: tuple[float, float], pods: int) -> float:
        """Return a lower bound on the cost of the missing shares and pods."""
        least = pods * self._cheapest_pod[i] if pods > 0 else 0.0
        prompts, decoding = missing
        for mix, price in zip(MIXES, self._price_of_a_share[i], strict=True):
            lacks = mix * prompts + (1.0 - mix) * decoding
            if lacks > NEARLY:
                least = max(least, lacks * price)
        return least

    def _counts(self, i: int, pods: int, missing: tuple[float, float]) -> list[int]:
        """Return the counts to try, nearest to the present one first, so that good sets are found early."""
        offer, shares = self.offers[i], self._shares[i]
        alone = [
            ceil(lacks / share - NEARLY) for lacks, share in zip(missing, shares, strict=True) if share and lacks > 0
        ]
        highest = max([*alone, offer.least, self._least - pods])
        if offer.most is not None:
            highest = min(highest, offer.most)
        highest = int(min(highest, self._most - pods - self._least_left[i + 1]))
        lowest = offer.least
        if i == len(self.offers) - 1 and alone:  # no other variant is left for the rest
            lowest = max(lowest, min(highest, max(alone)))
        return sorted(range(lowest, highest + 1), key=lambda count: (abs(count - offer.held), count))
