"""Bounds and rules that several sections of a policy resource share; part of `policy_fields`."""

from extproc.policy.field_kinds import Number, Path, Rule

POLICY: Path = ("policy",)

SHARE = Number(most=1.0)
REAL_SHARE = Number(above=0.0, most=1.0)
SECONDS = Number(above=0.0, most=86_400.0)
SECONDS_OR_NONE = Number(most=86_400.0)
AMOUNT = Number(above=0.0, most=1e15)
AMOUNT_OR_NONE = Number(most=1e15)
COUNT = Number(least=1, most=1_000_000, whole=True)
COUNT_OR_NONE = Number(most=1_000_000, whole=True)


def at_most(lower: str, upper: str) -> Rule:
    """Return the rule that one field is not above another one, where both are given."""
    return Rule(
        cel=f"!has(self.{lower}) || !has(self.{upper}) || self.{lower} <= self.{upper}",
        message=f"{lower} must not be above {upper}",
        holds=lambda given: lower not in given or upper not in given or given[lower] <= given[upper],
    )
