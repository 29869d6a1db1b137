"""The token sources of one pool's models, and their checks.

Changed problems are reported as a finding, a metric and a log line: prompts routed on text only, tokens that differ
from the pods', a folder that cannot be loaded, a template without end, an unknown model.
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from extproc.errors import ConfigError, PromptTokensError
from extproc.ledger.picker_telemetry import PickerTelemetry
from extproc.models.models import ServedModel, TokensFrom
from extproc.pods.endpoint import EndpointStatus, Reachability
from extproc.pods.metrics_scraper import MetricsScraper
from extproc.pods.pod_ranks import pod_of
from extproc.policy.model_tokens import ModelTokens, not_seen
from extproc.pools.shared_resources import SharedResources
from extproc.prompts.folder_checks import TokenChecks, TokenVerdict
from extproc.prompts.pod_render import PodRender, RenderSettings
from extproc.prompts.prompt_tokens import TOKENS_DIFFER, UNKNOWN_MODEL, PromptTokenSource, TokenSource, TokenWatch

log = logging.getLogger(__name__)

RENDER_CACHE_BYTES_OF_A_POOL = 4 << 20  # there may be hundreds of pools
SHOWN_PODS = 3
TEXT_ONLY = "text-only"
TOKENIZER_FOLDER = "tokenizer-folder"
TEMPLATE_LIMITS = "template-limits"
MODELS_UNKNOWN = "models-unknown"
REMEDIES: Mapping[str, str] = {
    TOKENS_DIFFER: "compare the tokenizer folder, the chat template and its default kwargs with the pods' "
    "(`kvmesh doctor`)",
    TOKENIZER_FOLDER: "copy the folder that the pods load again; it is tried again by itself",
    TEMPLATE_LIMITS: "read the template, and correct the folder: it is loaded again when a file changes",
    TEXT_ONLY: "give the model a tokenizer folder (--tokenizer, KVMESH_TOKENIZERS, `tokenizer` in `models`), or let "
    "the picker ask its pods: `tokens: auto`, and vLLM pods that answer POST /tokenize or, with --enable-scale-out, "
    "/render",
    MODELS_UNKNOWN: "see what the pods answer to GET /v1/models (`kvmesh doctor`), or declare the model: the pool's "
    "annotation kvmesh.io/model, or `models` in a policy",
}
FACTS: Mapping[str, str] = {
    TOKENS_DIFFER: "its tokenizer folder makes other tokens than its pods; one that differs from most is used only if "
    "no pod can be asked",
    TOKENIZER_FOLDER: "its tokenizer folder cannot be loaded, and the pods are asked",
    TEMPLATE_LIMITS: "its chat template is no longer rendered, and the pods are asked for the tokens of chats",
    TEXT_ONLY: "prompts are routed on their text, which only predicts",
    MODELS_UNKNOWN: "no pod has told which models it serves, and none is declared: prompts are routed on their text, "
    "and the index is not asked",
}
# the order for a model with several findings
WORST_FIRST = (TEMPLATE_LIMITS, TEXT_ONLY, TOKENS_DIFFER, TOKENIZER_FOLDER)
SAID_EVERY_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFinding:
    """A problem with a model's tokens."""

    model: str
    reason: str
    message: str


class TokenReporter:
    """Checks the sources of tokens, and reports changed findings."""

    def __init__(
        self,
        *,
        watch: TokenWatch,
        show: Callable[..., None],
        clock: Callable[[], float],
        found: Mapping[str, Callable[[], Mapping[str, str]]] | None = None,
    ) -> None:
        """`found` returns, for each further reason, the affected models and why.

        `show(model=, reason=, stands=)` shows a finding that has appeared or is gone.
        """
        self._watch = watch
        self._found = {TEXT_ONLY: lambda: watch.text_only, **(found or {})}
        self._show = show
        self._clock = clock
        self._standing: dict[tuple[str, str], TokenFinding] = {}
        self._said: set[tuple[str, str]] = set()  # current findings already logged
        self._said_at: dict[tuple[str, str], float] = {}

    @property
    def findings(self) -> Mapping[tuple[str, str], TokenFinding]:
        """The findings by model and reason, as of the last look."""
        return self._standing

    def look(self) -> None:
        """Evaluate recent prompts, and report new and resolved findings; at most one warning a minute for each."""
        now, before = self._clock(), self._standing
        self._watch.judge(now=now)
        self._standing = {
            (model, reason): _finding(model, reason, why)
            for reason, found in self._found.items()
            for model, why in found().items()
        }
        for model, reason in self._standing.keys() - before.keys():
            self._show(model=model, reason=reason, stands=True)
        for name in before.keys() - self._standing.keys():
            model, reason = name
            self._show(model=model, reason=reason, stands=False)
            if name in self._said:
                self._said.discard(name)
                log.info("%s: this is over for the model %s", reason, model)
        for name in self._standing.keys() - self._said:
            if now - self._said_at.get(name, now - SAID_EVERY_SECONDS) >= SAID_EVERY_SECONDS:
                self._said.add(name)
                self._said_at[name] = now
                log.warning("%s: %s", name[1], self._standing[name].message)


def shown_tokens(
    models: Iterable[ServedModel], *, sources: Mapping[str, TokenSource], reporter: TokenReporter
) -> tuple[ModelTokens, ...]:
    """Return each model's token source: the observed one, or the configured one before any request."""
    shown = []
    for expected in not_seen(models):
        seen = sources.get(expected.model)
        names = ((expected.model, reason) for reason in WORST_FIRST)
        finding = next((reporter.findings[name] for name in names if name in reporter.findings), None)
        if finding is not None:
            reason, message = finding.reason, finding.message
        elif seen is not None:
            reason, message = "", ""
        else:
            reason, message = expected.reason, expected.message
        shown.append(replace(expected, seen="" if seen is None else seen.value, reason=reason, message=message))
    return tuple(shown)


def _finding(model: str, reason: str, why: str) -> TokenFinding:
    because = f" ({why})" if why else ""
    return TokenFinding(model=model, reason=reason, message=f"{model}: {FACTS[reason]}{because}: {REMEDIES[reason]}")


class PoolTokens:
    """The parts of a pool that deal with tokens; `prompts` combines them into the source for picks."""

    def __init__(
        self,
        resources: SharedResources,
        telemetry: PickerTelemetry,
        *,
        endpoints: Callable[[], MetricsScraper],
        declared: Callable[[], Sequence[ServedModel]],
        is_from_flags: bool,
    ) -> None:
        """`declared` returns the models with their intended folders."""
        self._resources = resources
        self._endpoints = endpoints
        self._declared = declared
        self._is_from_flags = is_from_flags
        self._doubts: dict[str, str] = {}  # the models whose folder is distrusted, and why
        self.render = self._render()
        self.checks = TokenChecks(render=self.render, doubts=self._doubts)
        self.watch = TokenWatch()
        self.reporter = TokenReporter(
            watch=self.watch,
            found={
                TOKENS_DIFFER: self._differing,
                TOKENIZER_FOLDER: self._folder_problems,
                TEMPLATE_LIMITS: self._template_breaches,
                MODELS_UNKNOWN: self._unknown_models,
            },
            show=telemetry.model_finding,
            clock=time.monotonic,
        )
        telemetry.show_token_sources(self.watch.counts)
        telemetry.show_token_states(
            lambda: {(model, state.verdict.value): 1.0 for model, state in self.checks.states.items()}
        )

    def prompts(self, served: Sequence[ServedModel]) -> PromptTokenSource:
        """Return the token source for these models' prompts. Raise ConfigError if a folder cannot be used."""
        resources = self._resources
        if self._is_from_flags and all(model.tokens_from is TokensFrom.TEXT for model in served):
            log.warning("prompts are not tokenized: requests are routed on load and on what was routed before")
        try:
            return PromptTokenSource(
                served,
                render=self.render,
                settings=resources.token_settings,
                load=resources.tokenizers.get,
                long_work=resources.long_work,
                watch=self.watch,
                doubts=self._doubts,
            )
        except PromptTokensError as error:
            raise ConfigError(str(error)) from error

    def are_other(self, prompts: PromptTokenSource, served: Sequence[ServedModel]) -> bool:
        """Tell whether a folder of these models was reloaded since `prompts` was created."""
        loaded, cache = prompts.tokenizers, self._resources.tokenizers
        return any(
            model.tokens_from is TokensFrom.TOKENIZER and loaded.get(model.name) is not cache.get(model)
            for model in served
        )

    async def check(self, prompts: PromptTokenSource, served: Sequence[ServedModel]) -> None:
        """Compare each folder's tokens with one more pod's, if any was not asked yet."""

        def serving(model: str) -> Sequence[str]:
            return _serving(self._endpoints().known(now=time.monotonic()), model)

        await self.checks.look(prompts.tokenizers, served, serving)

    def keep_models(self, names: set[str]) -> None:
        """Drop all other models: they are no longer configured."""
        self.watch.keep(names)
        self.reporter.look()

    def keep_endpoints(self, addresses: Sequence[str]) -> None:
        """Drop all other pods: they are gone."""
        self.render.keep(addresses)
        self.checks.keep(addresses)

    def restarted(self, address: str) -> None:
        """Drop a pod's answers: it is a new process now."""
        self.render.is_another(address)
        self.checks.is_another(address)

    def shown(self, served: Sequence[ServedModel]) -> tuple[ModelTokens, ...]:
        """Return the observed token source of each model."""
        return shown_tokens(served, sources=self.watch.sources, reporter=self.reporter)

    def close(self) -> None:
        """Close the connections to the pods."""
        self.render.close()

    def _differing(self) -> Mapping[str, str]:
        return {
            model: state.why for model, state in self.checks.states.items() if state.verdict is TokenVerdict.DIFFERS
        }

    def _folder_problems(self) -> Mapping[str, str]:
        problem = self._resources.tokenizers.problem
        return {model.name: why for model in self._declared() if (why := problem(model)) is not None}

    def _template_breaches(self) -> Mapping[str, str]:
        breach = self._resources.tokenizers.breach
        return {model.name: why for model in self._declared() if (why := breach(model))}

    def _unknown_models(self) -> Mapping[str, str]:
        """Return a finding if requests arrive but no model is known; a pool of flags logs this at start-up instead."""
        is_unknown = self.watch.has_unknown and not self._is_from_flags and not self._declared()
        return {UNKNOWN_MODEL: self._why_unknown()} if is_unknown else {}

    def _why_unknown(self) -> str:
        problems = self._endpoints().problems()
        return "; ".join(f"{address}: {why}" for address, why in sorted(problems.items())[:SHOWN_PODS])

    def _render(self) -> PodRender:
        seconds = self._resources.settings.render_timeout_seconds
        settings = RenderSettings(timeout_seconds=seconds, media_timeout_seconds=4 * seconds)
        if not self._is_from_flags:  # one of many pools
            settings = replace(settings, cache_bytes=RENDER_CACHE_BYTES_OF_A_POOL)

        def serving(model: ServedModel) -> Sequence[str]:
            return _serving(self._endpoints().snapshot(now=time.monotonic()), model.name)

        def is_sglang(address: str) -> bool:
            pods = [each for each in self._endpoints().known(now=time.monotonic()) if pod_of(each.address) == address]
            return any(pod.models is not None and pod.models.is_sglang for pod in pods)

        return PodRender(
            endpoints=serving,
            settings=settings,
            doubts=self._doubts,
            is_sglang=is_sglang,
            key=self._resources.pod_key,
        )


def _serving(statuses: Sequence[EndpointStatus], model: str) -> list[str]:
    """Return the ready pods that serve the model: asking any other would cost the deadline."""
    serving = [
        pod_of(status.address)
        for status in statuses
        if status.reachability is Reachability.READY and (status.models is None or status.models.serves(model))
    ]
    return list(dict.fromkeys(serving))
