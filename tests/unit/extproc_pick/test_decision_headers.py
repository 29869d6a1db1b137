"""What clients are told of the decision: an id under which it is found, and the cached tokens that are expected."""

import asyncio

import pytest

from extproc.errors import InternalPickError, UnknownModelError
from extproc.ledger.access_log import NameHashes, record_of_decision
from extproc.ledger.facts import Decided, Ended
from extproc.models.models import ModelTable
from extproc.pick import pick
from extproc.pools.plan_response import DECISION_HEADER, PREDICTED_HEADER, new_decision_id, predicted_anew
from extproc.prefixes.prompt_match import IndexHits, PromptKeys
from extproc.prompts.tokenized_prompt import PromptTokens
from tests.unit.extproc_pick.pick_fakes import (
    ONE_MODEL,
    FakeIndex,
    FakePrompts,
    Hits,
    ShownPool,
    chat,
    facts,
    pod,
    runtime,
    tokens,
)

KEYS = PromptKeys(keys=bytes(range(240)), tokens_each=16)  # 30 keys
WARM = IndexHits(prompts=[Hits({"a": 30})], keys=[KEYS], states={"a": "live"})


class Observer:
    def __init__(self) -> None:
        self.told: list[Decided] = []

    def decided(self, decided: Decided, /) -> None:
        self.told.append(decided)

    def ended(self, ended: Ended, /) -> None: ...


def telling(
    prompts: FakePrompts | None = None, *, models: ModelTable = ONE_MODEL, **changes: object
) -> tuple[ShownPool, Observer]:
    some_prompts = prompts or FakePrompts(tokens(500))
    a_pool = runtime(pod("a"), index=FakeIndex(WARM), prompts=some_prompts, models=models)
    a_pool.tells_decisions = True
    observer = Observer()
    a_pool.watch.observers.append(observer)
    for name, value in changes.items():
        setattr(a_pool, name, value)
    return a_pool, observer


async def test_the_answers_id_is_that_of_the_decision_on_the_page_and_in_the_access_log() -> None:
    a_pool, observer = telling()
    first, second = await pick(facts(), chat(), a_pool), await pick(facts(), chat(), a_pool)
    await asyncio.sleep(0)  # what is remembered comes after the answer
    ids = [exchange.response_headers[DECISION_HEADER] for exchange in (first, second)]
    assert ids[0] != ids[1]
    assert [record.id for record in reversed(a_pool.recent)] == ids
    lines = [record_of_decision(decided, NameHashes(b"k" * 16)) for decided in observer.told]
    assert [line.decision_id for line in lines] == ids
    assert first.response_headers[PREDICTED_HEADER] == "480"
    assert [line.predicted_cached_tokens for line in lines] == [480, 480]


@pytest.mark.parametrize(
    "found", [PromptTokens(), PromptTokens(estimated_tokens=900), PromptTokens(chunks=bytes(16), chunk_tokens=128)]
)
async def test_nothing_is_predicted_where_the_prompts_tokens_are_not_known(found: PromptTokens) -> None:
    a_pool, _ = telling(FakePrompts(found))
    exchange = await pick(facts(), chat(), a_pool)
    assert set(exchange.response_headers) == {DECISION_HEADER}


async def test_a_refusal_names_its_decision_too_and_so_does_a_defect() -> None:
    a_pool, observer = telling(models=ModelTable(only_listed=True))
    with pytest.raises(UnknownModelError) as refused:
        await pick(facts(), chat(), a_pool)
    a_pool, defect_observer = telling(FakePrompts(ValueError("a defect")))
    with pytest.raises(InternalPickError) as failed:
        await pick(facts(), chat(), a_pool)
    await asyncio.sleep(0)
    for error, told in ((refused.value, observer.told), (failed.value, defect_observer.told)):
        assert error.headers == {DECISION_HEADER: told[0].record.id}


async def test_a_request_that_is_sent_without_a_decision_is_found_by_its_id() -> None:
    a_pool, observer = telling(FakePrompts(ValueError("a defect")), anywhere=lambda: ("a",))
    exchange = await pick(facts(), chat(), a_pool)
    await asyncio.sleep(0)
    assert exchange.response_headers == {DECISION_HEADER: observer.told[0].record.id}


async def test_clients_are_told_nothing_where_it_is_switched_off() -> None:
    a_pool, observer = telling(tells_decisions=False)
    exchange = await pick(facts(), chat(), a_pool)
    await asyncio.sleep(0)
    assert exchange.response_headers == {}
    assert len(observer.told[0].record.id) == 16  # it has a name all the same


@pytest.mark.parametrize(
    ("served_by", "from_pod", "is_told"),
    [("a", True, True), (None, True, True), ("b", True, False), (None, False, False)],
)
async def test_a_prediction_is_not_told_of_another_pods_answer(
    served_by: str | None, from_pod: bool, is_told: bool
) -> None:
    a_pool, _ = telling()
    exchange = await pick(facts(), chat(), a_pool)
    exchange.responded(status=200 if from_pod else 503, served_by=served_by, from_pod=from_pod)
    assert DECISION_HEADER in exchange.response_headers
    assert (PREDICTED_HEADER in exchange.response_headers) is is_told


async def test_a_prompt_that_another_pod_computes_is_predicted_by_what_that_pod_holds() -> None:
    a_pool, _ = telling()
    exchange = await pick(facts(), chat(), a_pool)
    exchange.comes_from(cached_tokens=96)
    assert exchange.response_headers[PREDICTED_HEADER] == "96"
    exchange.comes_from(cached_tokens=None)
    assert set(exchange.response_headers) == {DECISION_HEADER}
    assert predicted_anew({"other": "1"}, 5) == {"other": "1"}


def test_ids_are_sixteen_hex_digits_and_differ() -> None:
    ids = {new_decision_id() for _ in range(1000)}
    assert len(ids) == 1000
    assert all(len(each) == 16 and int(each, 16) >= 0 for each in ids)
