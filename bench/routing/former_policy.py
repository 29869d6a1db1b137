"""A policy in the format that checkouts took before it was an InferencePolicy, so that they can still be compared."""

import re
from collections.abc import Mapping
from typing import Any

CAPITAL = re.compile(r"(?<=[a-z])[A-Z]")
_RENAMED = {"recentSeconds": "recentPrefixSeconds", "unfollowedSeconds": "unfollowedPrefixSeconds"}


def former_policy(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `spec` of an InferencePolicy as the mapping that `--policy` took; `models` is left out."""
    load, priorities = dict(spec.get("load", {})), dict(spec.get("priorities", {}))
    tenants = priorities.pop("tenants", {})
    priorities |= {f"tenant{name.capitalize()}": value for name, value in tenants.items()}
    priorities |= {"overload": load.pop("overload")} if "overload" in load else {}
    priorities |= {"quotas": spec["quotas"]} if "quotas" in spec else {}
    priorities |= {"classes": _by_name(priorities["classes"])} if "classes" in priorities else {}
    if "objectives" in priorities:
        priorities["objectives"] = {each["name"]: each["priorityClass"] for each in priorities["objectives"]}
    if "rules" in priorities:
        priorities["rules"] = [_rule(each) for each in priorities["rules"]]
    cache = {_RENAMED.get(name, name): value for name, value in spec.get("prefixCache", {}).items()}
    others = {name: spec[name] for name in ("autoscale", "disaggregation", "observability") if name in spec}
    whole = {**spec.get("scoring", {}), **cache, **load, **others, **({"priorities": priorities} if priorities else {})}
    found: dict[str, Any] = _snake(whole)
    return found


def _by_name(items: list[Mapping[str, Any]]) -> dict[str, Any]:
    return {each["name"]: {name: value for name, value in each.items() if name != "name"} for each in items}


def _rule(rule: Mapping[str, Any]) -> dict[str, Any]:
    pairs = {
        part: {each["name"]: each["value"] for each in rule[part]} for part in ("headers", "claims") if part in rule
    }
    return {**rule, **pairs}


def _snake(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {CAPITAL.sub(lambda big: f"_{big[0].lower()}", name): _snake(part) for name, part in value.items()}
    return [_snake(part) for part in value] if isinstance(value, list) else value
