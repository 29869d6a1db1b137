"""The status of an InferencePolicy: conditions in the form of the Kubernetes API. Pure; time is an argument.

The conditions follow GEP-713: each installation has one entry in `status.ancestors`, under its own controller name, so
that installations with different views never overwrite each other. `Accepted` and `Programmed` are always present,
`Warning` and `ExactTokens` only while there is something to fix, `Shadow` only in shadow mode.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any, Self

import msgspec
from msgspec import structs

from extproc.policy.model_tokens import ModelTokens, condition_words
from kvmesh.documents.documents import PICKER_SERVICE, controller_name

ACCEPTED, PROGRAMMED, WARNING, EXACT_TOKENS, SHADOW = "Accepted", "Programmed", "Warning", "ExactTokens", "Shadow"
TYPES = (ACCEPTED, PROGRAMMED, WARNING, EXACT_TOKENS, SHADOW)
INVALID, TARGET_NOT_FOUND = "Invalid", "TargetNotFound"  # reasons of Accepted: "False"
PARTLY = "PartiallyProgrammed"  # of Programmed: "True"
ONLY_COUNTED = "OnlyCounted"  # of Shadow: "True"
CONFLICTED, OVERRIDDEN, PENDING = "Conflicted", "Overridden", "Pending"  # of Programmed: "False"
TRUE, FALSE = "True", "False"
MOST_MESSAGE_CHARACTERS = 1024  # the API accepts 32,768, far more than anyone reads
MOST_FIELDS_NAMED = 8


class Standing(IntEnum):
    """A claim's fate before this decision; the lowest wins."""

    IN_FORCE = 0
    NEW = 1
    LOST = 2


class Condition(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """One condition of a status, with the API's field names."""

    type: str
    status: str  # "True" | "False"
    reason: str
    message: str
    observed_generation: int
    last_transition_time: str = ""  # RFC 3339; of the last change of `status`


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyStatus:
    """The desired status of one policy."""

    namespace: str
    name: str
    uid: str  # "" without one (a file)
    observed_generation: int
    conditions: tuple[Condition, ...]
    hosts: Mapping[str, Standing] = field(default_factory=dict)  # the claimed ones
    installation: str = "default"  # the author: the namespace of its pickers

    @property
    def source(self) -> str:
        """The policy's "namespace/name"."""
        return f"{self.namespace}/{self.name}"

    def entry(self) -> dict[str, Any]:
        """Return this installation's entry in `status.ancestors`; the ancestor is its picker's Service."""
        return {
            "ancestorRef": {"group": "", "kind": "Service", "namespace": self.installation, "name": PICKER_SERVICE},
            "controllerName": controller_name(self.installation),
            "conditions": list(msgspec.to_builtins(self.conditions)),
            **({"hosts": self._hosts()} if self.hosts else {}),
        }

    def _hosts(self) -> list[dict[str, Any]]:
        return [{"name": host, "inForce": standing is Standing.IN_FORCE} for host, standing in self.hosts.items()]

    def since(self, *earlier: Iterable[Condition], now: str) -> Self:
        """Return the status with each condition's transition time.

        `earlier` are the former conditions, the most trusted first: the document's, then our last ones.
        """
        known: dict[tuple[str, str], str] = {}
        for conditions in earlier:
            for condition in conditions:
                known.setdefault((condition.type, condition.status), condition.last_transition_time)
        return replace(
            self,
            conditions=tuple(
                structs.replace(each, last_transition_time=known.get((each.type, each.status)) or now)
                for each in self.conditions
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """The findings on one policy after a merge; empty if all is well."""

    invalid: str = ""  # the error, and the version in force instead
    missing_targets: tuple[str, ...] = ()  # "InferencePool a/b: …"
    has_targets_left: bool = False  # some other target exists
    conflicts: Mapping[str, Sequence[str]]  # winner "namespace/name" -> fields lost to it at the same level
    lost_hosts: Mapping[str, Sequence[str]] = field(default_factory=dict)  # winner -> hosts
    overridden: Mapping[str, Sequence[str]]  # winner -> fields lost to more specific policies at every pool
    is_lost: bool = False  # other policies decide all its fields, at every pool that it covers
    emptiness: str = ""  # why it covers no pool
    warnings: tuple[str, ...] = ()
    hosts: Mapping[str, Standing] = field(default_factory=dict)  # the claimed ones
    shadow: str = ""  # the pools in shadow mode, and the policies that say so


def conditions_of(
    found: Findings, *, generation: int, tokens: Sequence[tuple[str, ModelTokens]] = ()
) -> tuple[Condition, ...]:
    """Return the conditions, `Accepted` first, without times.

    `tokens` has the models (with their pools) whose requests have shown inexact tokens.
    """
    warnings = found.warnings
    if found.missing_targets and found.has_targets_left:
        warnings = (*found.missing_targets, *warnings)
    accepted = _accepted(found)
    given = [accepted, _programmed(found, accepted)]
    if warnings:
        given.append((WARNING, TRUE, "CheckPolicy", "; ".join(warnings)))
    if tokens:
        given.append((EXACT_TOKENS, FALSE, *condition_words(tokens)))
    if found.shadow:
        words = f"nothing is refused, held back, degraded, offloaded or scaled, only counted: {found.shadow}"
        given.append((SHADOW, TRUE, ONLY_COUNTED, words))
    return tuple(
        Condition(type=kind, status=status, reason=reason, message=shortened(message), observed_generation=generation)
        for kind, status, reason, message in given
    )


def _accepted(found: Findings) -> tuple[str, str, str, str]:
    if found.invalid:
        return ACCEPTED, FALSE, INVALID, found.invalid
    if found.missing_targets and not found.has_targets_left:
        return ACCEPTED, FALSE, TARGET_NOT_FOUND, "; ".join(found.missing_targets)
    return ACCEPTED, TRUE, ACCEPTED, "the policy is valid, and what it names is there"


def _programmed(found: Findings, accepted: tuple[str, str, str, str]) -> tuple[str, str, str, str]:
    _, status, reason, _ = accepted
    if status == FALSE:
        return PROGRAMMED, FALSE, reason, "the policy is not in force as it is written: see Accepted"
    if found.emptiness:
        return PROGRAMMED, FALSE, PENDING, found.emptiness
    lost = []
    if found.conflicts:
        lost.append(
            f"an older policy (or one whose name comes first) of the same level decides: {_fields(found.conflicts)}"
        )
    if found.lost_hosts:
        lost.append(f"claimed first by another: {_fields(found.lost_hosts)}")
    if found.overridden:
        lost.append(f"has no effect anywhere, more specific policies decide: {_fields(found.overridden)}")
    if not lost:
        return PROGRAMMED, TRUE, PROGRAMMED, "the policy is in force"
    if found.is_lost:
        reason = OVERRIDDEN if found.overridden else CONFLICTED
        return PROGRAMMED, FALSE, reason, "; ".join(["nothing of it is in force", *lost])
    return PROGRAMMED, TRUE, PARTLY, "; ".join(lost)


def conditions_in(document: Mapping[str, Any], installation: str) -> tuple[Condition, ...]:
    """Read the installation's conditions in a document's status, leniently: any client may have written them."""
    given = (_entry_in(document, installation) or {}).get("conditions")
    if not isinstance(given, list):
        return ()
    return tuple(_condition(each) for each in given if isinstance(each, Mapping))


def hosts_in(document: Mapping[str, Any], installation: str) -> Mapping[str, Standing]:
    """Read the hosts that the installation has written, as leniently."""
    given = (_entry_in(document, installation) or {}).get("hosts")
    return {
        str(each.get("name")): Standing.IN_FORCE if each.get("inForce") is True else Standing.LOST
        for each in (given if isinstance(given, list) else ())
        if isinstance(each, Mapping)
    }


def is_written(wanted: PolicyStatus, document: Mapping[str, Any]) -> bool:
    """Tell whether the document already has this status; the entries of other installations do not matter."""
    entry = _entry_in(document, wanted.installation)
    if entry is None or entry.get("ancestorRef") != wanted.entry()["ancestorRef"]:
        return False
    written = conditions_in(document, wanted.installation)
    return (
        sorted(written, key=_type) == sorted(wanted.conditions, key=_type)
        and hosts_in(document, wanted.installation) == wanted.hosts
    )


def _entry_in(document: Mapping[str, Any], installation: str) -> Mapping[str, Any] | None:
    status = document.get("status")
    entries = status.get("ancestors") if isinstance(status, Mapping) else None
    name = controller_name(installation)
    for entry in entries if isinstance(entries, list) else ():
        if isinstance(entry, Mapping) and entry.get("controllerName") == name:
            return entry
    return None


def _type(condition: Condition) -> str:
    return condition.type


def _condition(given: Mapping[str, Any]) -> Condition:
    generation = given.get("observedGeneration")
    return Condition(
        type=str(given.get("type", "")),
        status=str(given.get("status", "")),
        reason=str(given.get("reason", "")),
        message=str(given.get("message", "")),
        observed_generation=generation if isinstance(generation, int) else 0,
        last_transition_time=str(given.get("lastTransitionTime") or ""),
    )


def _fields(by_winner: Mapping[str, Sequence[str]]) -> str:
    return "; ".join(
        f"{', '.join(paths[:MOST_FIELDS_NAMED])}"
        f"{f' and {len(paths) - MOST_FIELDS_NAMED} more' if len(paths) > MOST_FIELDS_NAMED else ''} (by {winner})"
        for winner, paths in sorted(by_winner.items())
    )


def shortened(message: str) -> str:
    """Return the message, cut to `MOST_MESSAGE_CHARACTERS`."""
    if len(message) <= MOST_MESSAGE_CHARACTERS:
        return message
    return message[: MOST_MESSAGE_CHARACTERS - 1].rstrip() + "…"
