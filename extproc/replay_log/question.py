"""The whole question: what would these policies have done to this log? Read, fitted, replayed, summed up."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from extproc.errors import ConfigError
from extproc.models.models import ModelTable
from extproc.policy.values import PickPolicy
from extproc.replay_log.arrivals import Arrivals, arrivals_of
from extproc.replay_log.fates import ALL, Fate, Sums, grouped, groups_of, recorded_fate
from extproc.replay_log.read_log import Log
from extproc.replay_log.simulate import Fleet, model_table, models_by_pod, simulate
from extproc.replay_log.simulated_pod import PodPace
from extproc.replay_log.step_fit import StepFit, fit_steps

RECORDED = "recorded"
# what a pod does of which neither the log nor the flags tell anything: a mid-sized model on one GPU
ASSUMED = PodPace(alone_seconds=0.01, seconds_a_prompt_token=1 / 8000)
PARTS = ("prefill", "step-ms", "stream-us", "base-ms", "running", "step-tokens", "cache-tokens")
LARGE_ERROR = 0.25


@dataclass(frozen=True, slots=True)
class Candidate:
    """One policy that is asked about."""

    name: str  # as it is shown
    policy: PickPolicy
    models: ModelTable


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The answer."""

    pods: int
    pace: PodPace
    fit: StepFit | None
    requests: int
    seconds: float  # from the first to the last arrival
    arrivals: Arrivals
    runs: Mapping[str, Mapping[tuple[str, str], Sums]]  # RECORDED, then each policy: class, tenant -> sums
    notes: tuple[str, ...] = field(default=())

    def shown(self) -> dict[str, Any]:
        """Return the JSON of it."""
        pace = self.pace
        return {
            "requests": self.requests,
            "seconds": self.seconds,
            "pods": self.pods,
            "pod": {
                "base_seconds": pace.base_seconds,
                "step_seconds": pace.alone_seconds,
                "seconds_a_stream": pace.seconds_a_stream,
                "seconds_a_prompt_token": pace.seconds_a_prompt_token,
                "most_running": pace.most_running,
                "step_tokens": pace.step_tokens,
                "cache_tokens": pace.cache_tokens,
                "fitted_answers": 0 if self.fit is None else self.fit.answers,
                "fit_error": None if self.fit is None else self.fit.error,
            },
            "outputs": {
                "counted": self.arrivals.counted,
                "estimated": self.arrivals.estimated,
                "borrowed": self.arrivals.borrowed,
            },
            "notes": list(self.notes),
            "runs": [
                {
                    "run": name,
                    "groups": [
                        {"class": group[0], "tenant": group[1], **asdict(sums)} for group, sums in groups.items()
                    ],
                }
                for name, groups in self.runs.items()
            ],
        }


def answer(
    log: Log,
    candidates: Sequence[Candidate],
    *,
    names: Mapping[str, str],
    pod: Mapping[str, float],
    pods: int | None,
    by_rules: bool,
    told: Callable[[str], None] = lambda _: None,
) -> Finding:
    """Replay a log under each policy. `pod`: what is given of a pod, by PARTS; `pods`: None: as many as it shows.

    `told` is told in words how far it has come.
    """
    fit, answers = fit_steps(log.records, step_tokens=int(pod.get("step-tokens", ASSUMED.step_tokens)))
    pace = pod_pace(fit, pod)
    arrivals = arrivals_of(log, answers, fit, names=names)
    seen = tuple(dict.fromkeys(record.endpoint for record in log.records if record.endpoint is not None))
    if pods is None and not seen:
        raise ConfigError("no request of the log reached a pod, so that it shows none: give --pods")
    made = (f"10.0.{number // 250}.{number % 250 + 1}:8000" for number in range(pods or 0))
    addresses = seen if pods is None else tuple(made)
    fleet = Fleet(addresses=addresses, pace=pace, models=models_by_pod(log.records) if pods is None else {})
    fates: dict[str, list[Fate]] = {RECORDED: [recorded_fate(record, names=names) for record in log.records]}

    def tell(name: str, sent: int) -> None:
        told(f"{name}: {sent} of {len(log.records)} requests")

    for candidate in candidates:
        fates[candidate.name] = simulate(
            arrivals.requests,
            policy=candidate.policy,
            models=model_table(candidate.models, log.records),
            fleet=fleet,
            by_rules=by_rules,
            told=partial(tell, candidate.name),
        )
    groups = groups_of([fate for each in fates.values() for fate in each])
    classes = candidates[0].policy.priorities.classes
    by_name = {each.name: each.policy.priorities.classes for each in candidates}
    return Finding(
        pods=len(addresses),
        pace=pace,
        fit=fit,
        requests=len(log.records),
        seconds=arrivals.requests[-1].at,
        arrivals=arrivals,
        runs={name: grouped(each, groups, classes=by_name.get(name, classes)) for name, each in fates.items()},
        notes=(*log.notes, *_notes(log, arrivals, fit, candidates, names=names, given=pod, by_rules=by_rules)),
    )


def pod_pace(fit: StepFit | None, given: Mapping[str, float]) -> PodPace:
    """Return the pace of a pod: what is given, else what the log shows, else what is assumed."""
    pace = ASSUMED
    if fit is not None:
        pace = replace(
            pace,
            alone_seconds=fit.alone_seconds or 1e-4,
            seconds_a_stream=fit.seconds_a_stream,
            seconds_a_prompt_token=fit.seconds_a_prompt_token or 1e-7,
            base_seconds=fit.base_seconds,
        )
    changes: dict[str, Any] = {}
    for name, field_name, of in (
        ("step-ms", "alone_seconds", lambda value: value / 1e3),
        ("stream-us", "seconds_a_stream", lambda value: value / 1e6),
        ("base-ms", "base_seconds", lambda value: value / 1e3),
        ("prefill", "seconds_a_prompt_token", lambda value: 1 / value),
        ("running", "most_running", int),
        ("step-tokens", "step_tokens", int),
        ("cache-tokens", "cache_tokens", int),
    ):
        if name in given:
            changes[field_name] = of(given[name])
    return replace(pace, **changes)


def read_pod(text: str) -> dict[str, float]:
    """Read `--pod`: `prefill=8000,step-ms=10`. Raise ConfigError."""
    found: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        if name.strip() not in PARTS:
            raise ConfigError(f"--pod: there is no {name.strip()!r}; there are {', '.join(PARTS)}")
        try:
            number = float(value)
        except ValueError:
            number = -1.0
        least = 0.0 if name.strip() in ("stream-us", "base-ms") else 1e-6
        if not least <= number <= 1e12:
            raise ConfigError(f"--pod: {part.strip()!r} needs a number above 0")
        found[name.strip()] = number
    return found


def _notes(
    log: Log,
    arrivals: Arrivals,
    fit: StepFit | None,
    candidates: Sequence[Candidate],
    *,
    names: Mapping[str, str],
    given: Mapping[str, float],
    by_rules: bool,
) -> Iterator[str]:
    if fit is None and not {"prefill", "step-ms"} <= given.keys():
        yield (
            "the tokens of too few answers are in the log to show how fast the pods were: what is not given is "
            "assumed; give --pod, or record with observability.sampleShare: 1"
        )
    if fit is not None and fit.error > LARGE_ERROR:
        yield f"the pods' times vary by {fit.error:.0%} around what was fitted to them: take the figures as rough"
    if arrivals.estimated:
        yield f"the output of {arrivals.estimated} answers was estimated from the time they took"
    if arrivals.borrowed:
        yield f"{arrivals.borrowed} requests reached no pod: their work is that of a served one of their kind"
    for candidate in candidates:
        yield from _policy_notes(log, candidate, names=names, by_rules=by_rules)


def _policy_notes(log: Log, candidate: Candidate, *, names: Mapping[str, str], by_rules: bool) -> Iterator[str]:
    priorities, name = candidate.policy.priorities, candidate.name
    unknown = {record.class_ for record in log.records} - set(priorities.classes) - {None}
    if unknown and not by_rules:
        classes = ", ".join(sorted(filter(None, unknown)))
        yield f"{name}: has no class {classes}: its requests take the default class {priorities.default_class}"
    if by_rules and any(rule.headers or rule.claims for rule in priorities.rules):
        yield f"{name}: its rules that look at headers or claims never match: a log has neither"
    unnamed = {quota.tenant for quota in priorities.quotas if quota.tenant != ALL} - set(names.values())
    if unnamed:
        yield (
            f"{name}: its quotas name {', '.join(sorted(unnamed))}, and the log has hashes in place of tenants: these "
            "quotas match nothing; give --audit-key-file, the pickers' own"
        )
    if priorities.shadow:
        yield f"{name}: is in shadow, so that it refuses and degrades nothing: see `withheld`, or take `shadow` out"
    if candidate.policy.disaggregation.enabled:
        yield f"{name}: prefill pods are not simulated: every pod computes its prompts itself"
