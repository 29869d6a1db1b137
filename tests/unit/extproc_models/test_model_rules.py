"""Which model a request gets: aliases, adapters, rewrites, splits that stick, fallbacks."""

from collections import Counter
from collections.abc import Mapping
from itertools import pairwise

import pytest

from extproc.errors import UnknownModelError
from extproc.models.models import (
    ModelRule,
    ModelTable,
    ModelTarget,
    ResolvedModel,
    ServedModel,
    StickyBy,
    fall_back,
    resolve,
)

LLAMA = ServedModel(name="org/llama", aliases=frozenset({"llama"}), adapters=frozenset({"sql-lora"}))
QWEN = ServedModel(name="org/qwen")
SPLIT = (ModelTarget(model="org/llama", weight=3.0), ModelTarget(model="org/qwen", weight=1.0))


def resolved(
    name: str | None,
    *,
    rules: tuple[ModelRule, ...] = (),
    only_listed: bool = False,
    user: str | None = None,
    headers: Mapping[str, str] | None = None,
    draw: float = 0.0,
    learned: Mapping[str, str] | None = None,
) -> ResolvedModel:
    table = ModelTable(served=(LLAMA, QWEN), rules=rules, only_listed=only_listed)
    return resolve(name, table=table, user=user, headers=headers or {}, draw=draw, learned=learned)


def split(sticky_by: StickyBy, *, targets: tuple[ModelTarget, ...] = SPLIT, header: str | None = None) -> ModelRule:
    return ModelRule(model="chat", targets=targets, sticky_by=sticky_by, sticky_header=header)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("org/qwen", ResolvedModel(requested="org/qwen", model="org/qwen", base=QWEN)),
        ("llama", ResolvedModel(requested="llama", model="llama", base=LLAMA)),
        ("sql-lora", ResolvedModel(requested="sql-lora", model="sql-lora", base=LLAMA, adapter="sql-lora")),
        ("new-lora", ResolvedModel(requested="new-lora", model="new-lora", base=QWEN, adapter="new-lora")),
        ("stranger", ResolvedModel(requested="stranger", model="stranger", base=None)),
        (None, ResolvedModel(requested=None, model=None, base=None)),
    ],
    ids=["served name", "alias", "listed adapter", "adapter that the pods report", "unknown", "none"],
)
def test_a_name_without_a_rule_is_kept_and_its_base_model_found(name: str | None, expected: ResolvedModel) -> None:
    found = resolved(name, learned={"new-lora": "org/qwen", "lost-lora": "org/gone"})
    assert (found, found.is_rewritten) == (expected, False)


def test_a_request_without_a_model_belongs_to_the_only_model_there_is() -> None:
    table = ModelTable(served=(QWEN,))
    assert resolve(None, table=table, user=None, headers={}, draw=0.0).base is QWEN


def test_with_only_listed_an_unknown_name_is_refused_and_the_names_are_told() -> None:
    rule = ModelRule(model="gpt-x", targets=(ModelTarget(model="sql-lora"),))
    with pytest.raises(UnknownModelError, match="'stranger' is not served here; there are gpt-x, llama, org/llama"):
        resolved("stranger", rules=(rule,), only_listed=True)
    assert resolved("gpt-x", rules=(rule,), only_listed=True).adapter == "sql-lora"


def test_a_rule_with_one_target_rewrites() -> None:
    rule = ModelRule(model="gpt-x", targets=(ModelTarget(model="sql-lora"),), fallbacks=("org/qwen",))
    found = resolved("gpt-x", rules=(rule,))
    assert found == ResolvedModel(
        requested="gpt-x",
        model="sql-lora",
        base=LLAMA,
        adapter="sql-lora",
        arm="sql-lora",
        fallbacks=("org/qwen",),
    )
    assert found.is_rewritten


def test_an_arm_of_the_clients_own_name_is_no_rewrite() -> None:
    rule = ModelRule(model="org/llama", targets=(ModelTarget(model="org/llama"), ModelTarget(model="org/qwen")))
    arms = [resolved("org/llama", rules=(rule,), draw=draw) for draw in (0.0, 0.9)]
    assert [(arm.model, arm.is_rewritten) for arm in arms] == [("org/llama", False), ("org/qwen", True)]


@pytest.mark.parametrize(
    ("draw", "arm"), [(0.0, "org/llama"), (0.7499, "org/llama"), (0.75, "org/qwen"), (0.9999999, "org/qwen")]
)
def test_a_draw_falls_on_the_arms_by_weight(draw: float, arm: str) -> None:
    assert resolved("chat", rules=(split(StickyBy.NOTHING),), draw=draw).arm == arm


def test_an_arm_of_weight_zero_gets_nothing() -> None:
    targets = (ModelTarget(model="org/llama", weight=0.0), ModelTarget(model="org/qwen", weight=1.0))
    for rule in (split(StickyBy.USER, targets=targets), split(StickyBy.USER, targets=targets[::-1])):
        arms = {resolved("chat", rules=(rule,), user=user, draw=0.0).arm for user in (None, *map(str, range(50)))}
        assert arms == {"org/qwen"}


def test_a_user_stays_on_its_arm_whatever_is_drawn_and_users_spread_by_weight() -> None:
    rule = split(StickyBy.USER)
    arms = [
        {resolved("chat", rules=(rule,), user=f"user-{i}", draw=draw).arm for draw in (0.0, 0.99)} for i in range(4000)
    ]
    assert {len(arm) for arm in arms} == {1}
    assert Counter(arm.pop() for arm in arms)["org/llama"] == pytest.approx(3000, abs=120)


def test_a_changed_weight_moves_clients_only_to_the_arm_that_grew() -> None:
    def arms(share: float) -> list[str]:
        targets = (ModelTarget(model="org/llama", weight=1 - share), ModelTarget(model="org/qwen", weight=share))
        rule = split(StickyBy.USER, targets=targets)
        return [resolved("chat", rules=(rule,), user=f"user-{i}").arm for i in range(500)]

    steps = [arms(share) for share in (0.01, 0.1, 0.5, 0.9)]
    for before, after in pairwise(steps):
        moved = {(was, now) for was, now in zip(before, after, strict=True) if was != now}
        assert moved == {("org/llama", "org/qwen")}


def test_a_split_can_stick_to_a_header_and_without_it_is_drawn() -> None:
    rule = split(StickyBy.HEADER, header="x-tenant")
    by_tenant = {
        resolved("chat", rules=(rule,), headers={"x-tenant": "acme"}, user=str(i), draw=i / 10).arm for i in range(10)
    }
    drawn = [resolved("chat", rules=(rule,), user="acme", draw=draw).arm for draw in (0.0, 0.9)]
    assert len(by_tenant) == 1
    assert drawn == ["org/llama", "org/qwen"]


def test_a_fallback_takes_the_models_place_and_leaves_those_behind_it() -> None:
    rule = ModelRule(
        model="chat", targets=(ModelTarget(model="org/qwen"),), fallbacks=("stranger", "sql-lora", "org/llama")
    )
    table = ModelTable(served=(LLAMA, QWEN), rules=(rule,))
    first = resolve("chat", table=table, user=None, headers={}, draw=0.0)
    assert fall_back("sql-lora", table=table, of=first) == ResolvedModel(
        requested="chat", model="sql-lora", base=LLAMA, adapter="sql-lora", arm="org/qwen", fallbacks=("org/llama",)
    )


def test_a_user_that_utf8_cannot_write_has_an_arm_all_the_same() -> None:
    assert resolved("chat", rules=(split(StickyBy.USER),), user="\ud800").arm in {"org/llama", "org/qwen"}
