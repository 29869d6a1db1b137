"""What the admin pages show of all pools of a picker, of one that is named, or of the only one. Changes nothing."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from msgspec import structs

from extproc.doctor.findings import Finding
from extproc.errors import KvmeshError, NoPoliciesError, PickError, UnknownPoolError
from extproc.ext_proc.exchange import RequestFacts
from extproc.pages.decision_state import decision_state
from extproc.pages.history_state import HistoryEvent
from extproc.pages.picker_state import DecisionState, ListedEndpoint, PickerState, PoolsState, PoolState
from extproc.pages.pool_pages import PoolPages
from extproc.policy.values import PickPolicy
from extproc.pools.decision_headers import new_decision_id
from extproc.pools.pool import Pool
from extproc.pools.pools import Pools
from extproc.records.request_events import DecisionRecord
from extproc.scaling.plan import Plan
from extproc.settings.shown_settings import ShownSettings
from extproc.telemetry.process_telemetry import process_text
from kvmesh.blocks.source import IndexStatus
from kvmesh.errors import IndexUnavailableError
from kvmesh.index.index_view import IndexView
from kvmesh.metrics.exposition import Form
from kvmesh.metrics.registry import MetricsPage
from kvmesh.pods.page_turns import PageTurns
from kvmesh.pods.pod_key import PodKey

LISTED_ENDPOINTS = 2000  # in the state of all pools; more are in those of each
NAMED_POOLS = 10  # where one is asked for that is not there
LONGEST_NAME = 200  # characters of a pool's name that are repeated

ExplainPolicies = Callable[[str | None], Awaitable[dict[str, Any]]]


class BadQueryError(KvmeshError):
    """A parameter of a page that says nothing, or is missing."""


class PickerPages:
    """The pages of all pools. `?pool=namespace/name` asks for one; without it, the only one or all in short."""

    def __init__(
        self,
        pools: Pools,
        *,
        view: IndexView,
        policies: ExplainPolicies | None = None,
        pod_key: PodKey | None = None,
        name: str = "",
    ) -> None:
        """`policies` explains which policies apply to a target; `pod_key` is what pods are shown; `name`: the picker's.

        None: the endpoints are those of `--endpoints`. They are one pool, which is shown without a name.
        """
        self.ready = False
        self.name = name
        self.view = view
        # of the checks at start-up; None: they are still to come. Pools that are followed are not checked
        self.findings: Sequence[Finding] | None = None if policies is None else ()
        self.settings: ShownSettings | None = None  # None: they are not shown
        self._pools = pools
        self._turns = PageTurns()
        self._policies = policies
        self._pod_key = pod_key
        self._pages: dict[str, PoolPages] = {}  # made when first asked for
        self._looking = asyncio.Lock()
        self._looked: tuple[float, IndexStatus | str] = (float("-inf"), "")

    # --- pools ----------------------------------------------------------------------------------------------------

    def reconfigure(self) -> None:
        """Take note that pools or their policies have changed: text that is not shown any more is forgotten at once."""
        known = self._pools.with_requests
        self._pages = {name: pages for name, pages in self._pages.items() if known.get(name) is pages.pool}
        for pages in self._pages.values():
            pages.prefixes.shows_text()

    def chosen(self, name: str | None) -> PoolPages | None:
        """Return the pool named, or the only one; None: there are several. Raise UnknownPoolError."""
        everything = self._pools.all
        if name and (self._policies is None or name not in everything):
            raise UnknownPoolError(f"the pool {name[:LONGEST_NAME]!r} is not known here; {self._known_pools()}")
        if not name and len(everything) != 1:
            return None
        return self._of(everything[name] if name else next(iter(everything.values())))

    def pages_of(self, name: str) -> PoolPages | None:
        """Return the pages of a pool by the name that its picker has."""
        found = self._pools.pool(name)
        return None if found is None else self._of(found)

    def named(self, name: str | None) -> PoolPages:
        """Return the pool named, or the only one. Raise UnknownPoolError, BadQueryError where there are several."""
        pages = self.chosen(name)
        if pages is None:
            names = ", ".join(line.pool for line in islice(self.pools(), 5))
            raise BadQueryError(f"there are several pools: name one of them with ?pool= ({names}, …)")
        return pages

    def _known_pools(self) -> str:
        if self._policies is None:
            return "this picker has one pool, which has no name: that of --endpoints"
        names = sorted(self._pools.all)
        further = f" and {len(names) - NAMED_POOLS} more" if len(names) > NAMED_POOLS else ""
        return f"there are {', '.join(names[:NAMED_POOLS])}{further}" if names else "there is none yet"

    def shown_name(self, pages: PoolPages) -> str:
        """Return the name that a pool is shown by, "" for that of `--endpoints`."""
        return "" if self._policies is None else pages.pool.name

    def pools(self) -> list[PoolState]:
        """Return a line for each pool; none for that of `--endpoints`."""
        return [] if self._policies is None else [self._of(pool).line() for pool in self._pools.all.values()]

    async def index(self, pages: PoolPages, *, fresh_seconds: float = 0.0) -> IndexStatus | str:
        """Return the pool's part of the index as it stood at most `fresh_seconds` ago, or why it cannot be read.

        The pool of `--endpoints` is shown all of the index, also what belongs to none of its pods.
        """
        not_before = time.monotonic() - fresh_seconds
        async with self._looking:  # one look serves all that ask at a time
            began, index = self._looked
            if began < not_before:
                began = time.monotonic()
                try:
                    index = (await self.view.look()).status
                except IndexUnavailableError as error:
                    index = str(error)
                self._looked = began, index
        if isinstance(index, str) or self._policies is None:
            return index
        addresses = {status.address for status in pages.statuses()}
        return replace(
            index,
            sources=tuple(line for line in index.sources if line.endpoint in addresses),
            findings=tuple(line for line in index.findings if line.endpoint in addresses),
        )

    # --- pages ----------------------------------------------------------------------------------------------------

    def readiness(self) -> tuple[bool, dict[str, Any]]:
        """Return whether traffic may come, and what is wrong.

        Neither a missing index nor a pool without endpoints counts: the picker serves what it can.
        """
        facts: dict[str, Any] = {"pools": len(self._pools.all), "endpoint_problems": {}, "index_problem": None}
        facts |= {"render_problems": {}, "tokenizers": {}}
        facts["pod_key_problem"] = None if self._pod_key is None else self._pod_key.problem or None
        for pool in self._pools.all.values():
            facts["endpoint_problems"] |= pool.endpoints.problems()
            facts["index_problem"] = facts["index_problem"] or pool.index.problem
            facts["render_problems"] |= pool.tokens.render.problems()
            facts["tokenizers"] |= pool.prompts.engines()
        return self.ready, facts

    async def metrics(self, form: Form = Form.TEXT) -> bytes:
        """Return the page of metrics.

        Every series of a pool that is followed has the label `pool`; pools without requests have none.
        """
        if self._policies is None and (only := self.chosen(None)) is not None:
            return await only.pool.telemetry.page(ready=self.ready, form=form)
        page = MetricsPage(form)
        for name, pool in self._pools.with_requests.items():
            if pool.has_counted:
                await page.add(pool.telemetry.registry, pool=name)
        own = self._pools.registry.text(created=True, form=form)
        return page.text() + own + process_text(ready=self.ready, form=form)

    async def state(self, *, pool: str | None = None) -> PickerState | PoolsState:
        """Return one pool's state; without a name the only one's, or that of all in short. Raise UnknownPoolError."""
        pages = self.chosen(pool)
        if pages is not None:
            state = pages.state(await self.index(pages), findings=self.findings)
            return structs.replace(state, pool=self.shown_name(pages), pools=self.pools())
        lines = [
            ListedEndpoint(pool=each.name, address=status.address, state=status.reachability.value)
            for each in self._pools.all.values()
            for status in each.endpoints.known(now=time.monotonic())
        ]
        return PoolsState(now=time.time(), pools=self.pools(), endpoints=lines[:LISTED_ENDPOINTS])

    def decisions(
        self, *, limit: int, request_id: str | None, decision_id: str | None = None, pool: str | None = None
    ) -> list[DecisionState]:
        """Return the last decisions of a pool or of all, newest first. Raise UnknownPoolError."""
        chosen = self.chosen(pool)
        found = [
            structs.replace(decision, pool=self.shown_name(pages) or None)
            for pages in ([chosen] if chosen is not None else [self._of(each) for each in self._pools.all.values()])
            for decision in pages.decisions(limit=limit, request_id=request_id, decision_id=decision_id)
        ]
        return sorted(found, key=lambda decision: -decision.at)[:limit]

    async def history(self, pool: str | None) -> HistoryEvent:
        """Return the last 15 minutes of a pool. Raise UnknownPoolError, BadQueryError where several are served."""
        return await self.history_of(self.named(pool))

    async def history_of(self, pages: PoolPages) -> HistoryEvent:
        """Return the last 15 minutes of a pool; requests go first."""
        return await self._turns.read(pages.history(picker=self.name, pool=self.shown_name(pages)))

    def plans(self, *, seconds: float, pool: str | None = None) -> list[Plan]:
        """Return how many pods each pool, or one, wants now or in so many seconds. Raise UnknownPoolError."""
        chosen = self.chosen(pool)
        pages = [chosen] if chosen is not None else [self._of(each) for each in self._pools.all.values()]
        return [structs.replace(each.pool.scale.plan(seconds=seconds), pool=self.shown_name(each)) for each in pages]

    async def explain(self, facts: RequestFacts, body: bytes, *, pool: str | None = None) -> DecisionState:
        """Decide without booking, for the pool named or the one of the request's host."""
        try:
            pages = self.chosen(pool) or self._of(self._pools.for_host(facts.headers.get("host", "")))
        except PickError as refusal:
            record = DecisionRecord(at=time.time(), id=new_decision_id(), facts=facts, model=None, outcome=refusal)
            return decision_state(record, policy=PickPolicy())
        explanation = await pages.explain(facts, body, await self.index(pages))
        return structs.replace(explanation, pool=self.shown_name(pages) or None)

    async def policies(self, target: str | None) -> dict[str, Any]:
        """Return which policies apply to a target (None: to all pools). Raise KvmeshError where there is none such."""
        if self._policies is None:
            raise NoPoliciesError(f"no policies are followed here (--kubernetes, --policies), hence none for {target}")
        return await self._policies(target)

    async def close(self) -> None:
        """Close the connections to the index."""
        await self.view.close()

    def _of(self, pool: Pool) -> PoolPages:
        pages = self._pages.get(pool.name)
        if pages is None or pages.pool is not pool:
            pages = self._pages[pool.name] = PoolPages(pool)
        return pages
