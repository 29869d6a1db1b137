"""One running picker for each pool: its books, scraper, index, queue and policy. Picks, books, counts.

`pools` has one for each pool and applies its configuration while requests run; the static pool of `--endpoints` is one
as well. Made of the parts that all pools share (`picker_parts`).
"""

import asyncio
import logging
import random
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from extproc.admission.classify import claims_named, headers_named
from extproc.admission.prepared_request import Prepared
from extproc.errors import ConfigError, InternalPickError, NoReadyEndpointError, PickError, PromptTokensError
from extproc.ext_proc.call import OpenExchange
from extproc.ext_proc.exchange import RequestFacts
from extproc.models.models import ModelTable, ServedModel, TokensFrom
from extproc.pick import Picked
from extproc.policy.pool_config import FAIL_OPEN, PoolConfig
from extproc.policy.priority import PriorityPolicy
from extproc.policy.values import Steering
from extproc.pools.admit_request import RequestAdmission
from extproc.pools.booked_exchange import BookedExchange, ReadResponse
from extproc.pools.picker_parts import PickerParts
from extproc.pools.plan_response import plan_response
from extproc.pools.pool_models import declared_models, models_of
from extproc.pools.pool_works import closed_endpoints, endpoint_picker, pool_works
from extproc.pools.request_watch import RequestWatch, Story, current_story, follow, set_headers_of
from extproc.pools.unbooked_exchange import UnbookedExchange
from extproc.prefixes.recent_routes import KEY_BYTES
from extproc.prompts.prompt_tokens import PromptTokenSource
from extproc.records.request_story import AskedFor, ClientLeftError, DecisionRecord, Fate
from extproc.replicas.shared_state import PoolShare
from extproc.responses.response_plan import ResponsePlan

log = logging.getLogger(__name__)

RECENT_DECISIONS = 200
RECENT_DECISIONS_OF_A_POOL = 50  # there may be hundreds of pools
FAILED_OPEN = "failed-open"  # an outcome: sent without a decision


class PoolPicker:
    """Implements `ext_proc_call.Picks` for one pool."""

    def __init__(self, config: PoolConfig, parts: PickerParts) -> None:
        """Raise ConfigError where the static pool's tokenizer cannot be used; other pools go on without it."""
        self.name = config.name
        self.config = config
        self.picked_at = float("-inf")  # monotonic seconds of the last pick
        self._parts = parts
        self._picks = 0  # under way: neither booked nor waiting, most of them
        self._memory_share = 1.0
        self._failed_open = False
        self._own_models = parts.settings.model_table.served
        self._models = models_of(config, self._own_models, parts.tokenizers)
        self._labels = self._models.names()
        self._one_address = parts.settings.steering is Steering.ORIGINAL_DST
        self.recent: deque[DecisionRecord] = deque(maxlen=RECENT_DECISIONS_OF_A_POOL if self.name else RECENT_DECISIONS)
        self.works = works = pool_works(config, parts)
        # what others look at
        self.telemetry, self.overload, self.books = works.telemetry, works.overload, works.books
        self.endpoints, self.index, self.shared, self.quotas = works.endpoints, works.index, works.shared, works.quotas
        self.match_reporter, self.realised_reporter = works.match_reporter, works.realised_reporter
        self.prompts = self._prompt_source(self._models)
        self.picker = endpoint_picker(works, config, parts, models=self._models, prompts=self.prompts)
        self.admission = RequestAdmission(
            picker=self.picker,
            policy=config.policy.priorities,
            pressure=works.pressure,
            estimates=works.books.estimates,
            health=works.books.health,
            queue=works.queue,
            book=self._booked,
            unbook=BookedExchange.finish,
            others=parts.others,
            telemetry=works.overload,
            clock=time.monotonic,
        )

    # --- ext_proc_call.Picks --------------------------------------------------------------------------------------

    async def pick(self, facts: RequestFacts, body: bytes | None) -> OpenExchange:
        """Decide and book, at once or when there is room; raise PickError with the answer for the client.

        Where the pool fails open, a request without a decision goes to any endpoint that may have it.
        """
        watch = self._parts.watch
        story = None
        if watch.is_used:
            story = watch.open(self.name, facts, audit_share=self.config.policy.observability.audit_share)
            follow(story)
        self._picks += 1
        try:
            return await self.admission.admit(facts, body)
        except PickError as refusal:
            if isinstance(refusal, NoReadyEndpointError) and (anywhere := self._anywhere(facts, refusal)) is not None:
                return anywhere
            self._refused(facts, refusal)
            raise
        except asyncio.CancelledError:
            if story is not None:
                self._abandoned(facts, story)
            raise
        except Exception as defect:
            log.exception("a pick failed; the client gets a 500", extra={"request_id": facts.request_id})
            internal = InternalPickError("kvmesh failed to route this request; its log says why")
            if (anywhere := self._anywhere(facts, internal)) is not None:
                return anywhere
            self._refused(facts, internal)
            raise internal from defect
        finally:
            self._picks -= 1

    def response(self, plan: ResponsePlan) -> ReadResponse:
        """Open a response whose pick, here or on another picker, made this plan."""
        watch = self._parts.watch
        return ReadResponse(books=self.books, plan=plan, story=watch.story_of(plan) if watch.reading else None)

    # --- changes while it runs ------------------------------------------------------------------------------------

    def apply(self, config: PoolConfig) -> None:
        """Go by another configuration from now on; what is open, waits or was learned stays.

        Raise ConfigError where a tokenizer cannot be used; whatever it raises, it may be tried again.
        """
        before = self.config
        models = models_of(config, self._own_models, self._parts.tokenizers)
        prompts = self.prompts if models == self._models else self._prompt_source(models)
        self.config = config
        try:
            if config.endpoints != before.endpoints:
                self.endpoints.set_endpoints(closed_endpoints(config.endpoints))
                self.books.set_endpoints(endpoint.address for endpoint in config.endpoints)
            if config.policy != before.policy or models != self._models:
                self._models, self.prompts, self._labels = models, prompts, models.names()
                self._retune(before.policy.priorities)
        except BaseException:
            self.config = before  # the next change tries again
            raise

    def share_memory(self, share: float) -> None:
        """Remember so much of what one pool alone may: there are others."""
        if share != self._memory_share:
            self._memory_share = share
            self.books.memory.reconfigure(self.config.policy, share=share)

    def leave(self) -> None:
        """Take nothing new: the pool is gone. What is open ends by itself, what waits has nowhere to go."""
        self.apply(replace(self.config, endpoints=()))

    def missing_tokenizers(self) -> Sequence[ServedModel]:
        """Return the models whose tokenizers are to be loaded."""
        lacks = self._parts.tokenizers.lacks
        return [model for model in self.declared_models() if lacks((model,))]

    def declared_models(self) -> Sequence[ServedModel]:
        """Return the models with the tokenizers that they are to have."""
        return declared_models(self.config, self._own_models).served

    def wanted_headers(self) -> frozenset[str]:
        """Return the request headers (lowercase) that the policy looks at."""
        return self._models.sticky_headers() | headers_named(self.config.policy.priorities)

    def wanted_claims(self) -> frozenset[str]:
        """Return the claims of a verified JWT that the policy looks at."""
        return claims_named(self.config.policy.priorities)

    def look(self) -> None:
        """Say what is wrong although nothing has failed; once a second while requests come."""
        self.match_reporter.look()

    def look_back(self) -> None:
        """Say which models' predictions do not come true; every few seconds."""
        self.realised_reporter.look()

    @property
    def has_counted(self) -> bool:
        """Whether there was any request."""
        return self._failed_open or bool(self.recent)

    @property
    def is_free(self) -> bool:
        """Whether no request is open or waits."""
        return not self._picks and not self.books.open_requests

    async def close(self) -> None:
        """End what waits, and let go of the pods."""
        self.admission.close()
        if self._parts.books.get(self.name) is self.books:  # and not those of a pool that has come in its place
            del self._parts.books[self.name]
        self.endpoints.close()
        await self.quotas.close()
        await self.works.render.close()

    # --------------------------------------------------------------------------------------------------------------

    def _retune(self, before: PriorityPolicy) -> None:
        policy, priorities = self.config.policy, self.config.policy.priorities
        self.endpoints.reconfigure(stale_after_seconds=policy.stale_after_seconds)
        self.books.reconfigure(policy, memory_share=self._memory_share)
        if isinstance(self.shared, PoolShare):
            self.shared.session_ttl_seconds = policy.session_seconds
        self.telemetry.reconfigure(policy)
        if priorities != before:  # else everybody keeps what was saved for a turn
            self.quotas.reconfigure(priorities.quotas)
            self.overload.know(priorities.classes)
            self.works.order.reconfigure(priorities)
            self.works.degradation.reconfigure(priorities)
            self.works.pressure.reconfigure(priorities)
        self.works.hot.reconfigure(policy.hotspot)
        self.picker = replace(self.picker, policy=policy, models=self._models, prompts=self.prompts)
        self.admission.reconfigure(self.picker, priorities)

    def _prompt_source(self, models: ModelTable) -> PromptTokenSource:
        served, parts = models.served, self._parts
        if not self.name and all(model.tokens_from is TokensFrom.TEXT for model in served):
            log.warning(
                "no tokenizer: prompts are not tokenized, requests are routed on load and on what was routed before"
            )
        try:
            return PromptTokenSource(
                served,
                render=self.works.render,
                settings=parts.token_settings,
                load=parts.tokenizers.get,
                large=parts.large_prompts,
            )
        except PromptTokensError as error:
            raise ConfigError(str(error)) from error

    def _anywhere(self, facts: RequestFacts, error: PickError) -> UnbookedExchange | None:
        """Return an exchange with an endpoint taken by chance; None where the pool fails closed, or has none."""
        if self.config.failure_mode != FAIL_OPEN:
            return None
        cordoned = self.config.policy.cordoned
        serving = [
            each.address
            for each in self.config.endpoints
            if each.ready and not each.terminating and each.address not in cordoned
        ]
        endpoints = [address for address in serving if facts.subset is None or address in facts.subset]
        if not endpoints:
            return None
        self.picked_at, self._failed_open = time.monotonic(), True
        self.telemetry.refused(FAILED_OPEN)
        most = 1 if self._one_address else 1 + self.config.policy.fallbacks
        chosen = random.sample(endpoints, min(most, len(endpoints)))
        story = current_story()
        if story is not None:
            self._tell(story, Fate.FAILED_OPEN, _refusal_record(facts, error, story), endpoint=chosen[0])
        return UnbookedExchange(endpoints=chosen, story=story, set_headers=set_headers_of(story))

    def _refused(self, facts: RequestFacts, refusal: PickError) -> None:
        self.telemetry.refused(refusal.reason)
        story = current_story()
        record = _refusal_record(facts, refusal, story)
        self.recent.appendleft(record)
        if story is not None:
            self._tell(story, Fate.REFUSED, record)

    def _abandoned(self, facts: RequestFacts, story: Story) -> None:
        left = ClientLeftError("the client left while it waited")
        self._tell(story, Fate.ABANDONED, _refusal_record(facts, left, story))

    def _tell(self, story: Story, fate: Fate, record: DecisionRecord, *, endpoint: str | None = None) -> None:
        if story.settle():  # else it was booked, and is told of as that
            asyncio.get_running_loop().call_soon(partial(story.decided, fate, record, endpoint=endpoint))

    def _booked(self, picked: Picked) -> BookedExchange:
        decision, prepared = picked.decision, picked.prepared
        resolved = prepared.resolved
        share = self.config.sample_share
        label = resolved.requested if resolved.requested is not None and resolved.requested in self._labels else ""
        # before the booking, as all that may fail: nobody would release it
        plan = plan_response(
            picked,
            pool=self.name,
            is_sampled=random.random() < (self._parts.settings.sample_share if share is None else share),  # noqa: S311
            read_below_bytes=self._parts.settings.read_below_bytes,
            reads=self._parts.reads,
            now=time.monotonic(),
            label=label,
            sent_at=time.time(),
        )
        story = current_story()
        exchange = BookedExchange(
            books=self.books,
            endpoints=decision.endpoints[:1] if self._one_address else decision.endpoints,
            booking=self.books.book(picked),
            model=label,
            arm=resolved.arm,
            body=prepared.sent.changed,
            removed_headers=prepared.sent.removed_headers,
            response_headers=prepared.told,
            plan=plan,
            story=story,
            set_headers=set_headers_of(story),
        )
        if story is not None:
            story.settle()
            story.will_be_read(plan)
            story.prompt_key, story.prepared = _prompt_key(prepared), None  # of which the body is no longer needed
        # the answer leaves in this turn of the loop; what nobody waits for comes after it
        asyncio.get_running_loop().call_soon(self._remember, prepared.facts, picked, story, label)
        return exchange

    def _remember(self, facts: RequestFacts, picked: Picked, story: Story | None, label: str) -> None:
        decision = picked.decision
        self.picked_at = now = time.monotonic()
        if decision.degraded:
            self._parts.degradations.note(decision.degraded, now=now)
        self.books.remember(picked, label=label)
        asked = picked.prepared.asked
        record = DecisionRecord(at=time.time(), facts=facts, model=asked.model, outcome=decision, asked=asked)
        self.recent.appendleft(record)
        if story is not None:
            story.decided(Fate.ROUTED, record, endpoint=decision.endpoints[0])
        if self._parts.watch.on_picked is not None:
            self._parts.watch.tell_picked(self.name, picked)


def tell_unrouted(watch: RequestWatch, facts: RequestFacts, refusal: PickError) -> None:
    """Tell those who observe of a request that belongs to no pool."""
    story = watch.open("", facts) if watch.is_used else None
    if story is not None:
        record = _refusal_record(facts, refusal, None)
        asyncio.get_running_loop().call_soon(story.decided, Fate.REFUSED, record)


def _refusal_record(facts: RequestFacts, refusal: PickError, story: Story | None) -> DecisionRecord:
    """Return what is remembered of a request without a decision."""
    asked = refusal.asked if isinstance(refusal.asked, AskedFor) else None
    if story is not None and story.prepared is not None:
        asked = story.prepared.asked
        story.prompt_key, story.prepared = _prompt_key(story.prepared), None
    model = asked.model if asked is not None else None
    return DecisionRecord(at=time.time(), facts=facts, model=model, outcome=refusal, asked=asked)


def _prompt_key(prepared: Prepared) -> bytes:
    return bytes(prepared.prompts[0].keys[-KEY_BYTES:]) if prepared.prompts else b""
