"""Where the models of one pool get their tokens, and what is believed of those that tell them."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from extproc.errors import ConfigError, PromptTokensError
from extproc.models.models import ServedModel, TokensFrom
from extproc.pods.endpoint import EndpointStatus, Reachability
from extproc.pods.metrics_scraper import MetricsScraper
from extproc.policy.model_tokens import ModelTokens
from extproc.pools.shared_resources import SharedResources
from extproc.pools.token_reports import MODELS_UNKNOWN, TOKENIZER_FOLDER, TokenReporter, shown_tokens
from extproc.prompts.pod_render import PodRender, RenderSettings
from extproc.prompts.prompt_tokens import TOKENS_DIFFER, PromptTokenSource
from extproc.prompts.token_checks import TokenChecks, TokenVerdict
from extproc.prompts.token_trust import Cause, Teller, TokenTrust
from extproc.prompts.token_watch import UNKNOWN_MODEL, TokenSource, TokenWatch
from extproc.responses.realised import OTHER_TOKENS, DriftFinding
from extproc.telemetry.picker_telemetry import PickerTelemetry

log = logging.getLogger(__name__)

RENDER_CACHE_BYTES_OF_A_POOL = 4 << 20  # there may be hundreds of pools
SHOWN_PODS = 3
WRONG_TOKENS = "the pods count other prompt tokens than it says; it is not asked until the pods change"


class PoolTokens:
    """The parts of a pool that know of tokens; `prompts` makes from them what a pick asks."""

    def __init__(
        self,
        resources: SharedResources,
        telemetry: PickerTelemetry,
        *,
        endpoints: Callable[[], MetricsScraper],
        declared: Callable[[], Sequence[ServedModel]],
        forget: Callable[[str], None],
        is_from_flags: bool,
    ) -> None:
        """`declared` returns the models with the folders that they are to have.

        `forget` begins anew with what a model's responses have shown.
        """
        self._resources = resources
        self._endpoints = endpoints
        self._declared = declared
        self._forget = forget
        self._is_from_flags = is_from_flags
        self.trust = TokenTrust()
        self.render = self._render()
        self.checks = TokenChecks(render=self.render, trust=self.trust)
        self.watch = TokenWatch()
        self.reporter = TokenReporter(
            watch=self.watch,
            found={
                TOKENS_DIFFER: self._doubts,
                TOKENIZER_FOLDER: self._folder_problems,
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
        """Return what makes tokens of these models' prompts. Raise ConfigError where a folder cannot be used."""
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
                trust=self.trust,
            )
        except PromptTokensError as error:
            raise ConfigError(str(error)) from error

    def are_other(self, prompts: PromptTokenSource, served: Sequence[ServedModel]) -> bool:
        """Tell whether a folder of these models was loaded again since `prompts` was made."""
        loaded, cache = prompts.tokenizers, self._resources.tokenizers
        return any(
            model.tokens_from is TokensFrom.TOKENIZER and loaded.get(model.name) is not cache.get(model)
            for model in served
        )

    async def check(self, prompts: PromptTokenSource, served: Sequence[ServedModel]) -> None:
        """Compare the folders' tokens with those of one pod more, where there is one that was not asked."""

        def serving(model: str) -> Sequence[str]:
            return _serving(self._endpoints().known(now=time.monotonic()), model)

        await self.checks.look(prompts.tokenizers, served, serving)

    def keep_models(self, names: set[str]) -> None:
        """Forget all other models: they are not configured any more."""
        self.watch.keep(names)
        self.trust.keep(names)
        self.reporter.look()

    def keep_endpoints(self, addresses: Sequence[str]) -> None:
        """Forget all other pods: they are gone, and others have come."""
        self.render.keep(addresses)
        self.checks.keep(addresses)
        self._pods_changed()

    def restarted(self, address: str) -> None:
        """Forget what a pod has said: it is another process now."""
        self.render.is_another(address)
        self.checks.is_another(address)
        self._pods_changed()

    def drift_stands(self, finding: DriftFinding) -> None:
        """Let go of a source of tokens that is found wrong; the next one is judged by what comes from now on."""
        model = finding.model
        if finding.reason != OTHER_TOKENS:
            return
        match self.watch.sources.get(model):
            case TokenSource.FOLDER:
                teller: Teller | None = Teller.FOLDER
            case TokenSource.PODS:
                teller = self.trust.teller_of_most(model)
            case _:
                return
        if teller is not None and self.trust.distrust(model, teller, Cause.DRIFT, WRONG_TOKENS):
            self.render.distrusted(model, teller)
            self._forget(model)

    def shown(self, served: Sequence[ServedModel]) -> tuple[ModelTokens, ...]:
        """Return where each model's tokens come from, as its requests have shown."""
        return shown_tokens(served, sources=self.watch.sources, reporter=self.reporter)

    def close(self) -> None:
        """Let go of the pods."""
        self.render.close()

    def _pods_changed(self) -> None:
        """Believe again whose tokens have not come true: the pods may say, or make, others now."""
        for model in self.trust.renew():
            self._forget(model)

    def _doubts(self) -> Mapping[str, str]:
        """Return, by model, which tokens are wrong."""
        differ = {
            model: state.why for model, state in self.checks.states.items() if state.verdict is TokenVerdict.DIFFERS
        }
        return {**differ, **self.trust.doubts}

    def _folder_problems(self) -> Mapping[str, str]:
        """Return, by model, why its folder cannot be loaded."""
        problem = self._resources.tokenizers.problem
        return {model.name: why for model in self._declared() if (why := problem(model)) is not None}

    def _unknown_models(self) -> Mapping[str, str]:
        """Return that nothing is known of the models, while requests come; flags that name none are said at start."""
        is_unknown = self.watch.has_unknown and not self._is_from_flags and not self._declared()
        return {UNKNOWN_MODEL: self._why_unknown()} if is_unknown else {}

    def _why_unknown(self) -> str:
        problems = self._endpoints().problems()
        return "; ".join(f"{address}: {why}" for address, why in sorted(problems.items())[:SHOWN_PODS])

    def _render(self) -> PodRender:
        seconds = self._resources.settings.render_timeout_seconds
        settings = RenderSettings(timeout_seconds=seconds, media_timeout_seconds=4 * seconds)
        if not self._is_from_flags:  # one of many
            settings = replace(settings, cache_bytes=RENDER_CACHE_BYTES_OF_A_POOL)

        def serving(model: ServedModel) -> Sequence[str]:
            return _serving(self._endpoints().snapshot(now=time.monotonic()), model.name)

        return PodRender(endpoints=serving, settings=settings, trust=self.trust, key=self._resources.pod_key)


def _serving(statuses: Sequence[EndpointStatus], model: str) -> list[str]:
    """Return the pods that report and serve the model: one that does not answer would cost the deadline."""
    return [
        status.address
        for status in statuses
        if status.reachability is Reachability.READY and (status.models is None or status.models.serves(model))
    ]
