"""The contents of the admin pages: of all pools of a picker, a named one, or the only one. Read-only."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from msgspec import structs

from extproc.errors import KvmeshError, NoPoliciesError, PickError, UnknownPoolError
from extproc.ext_proc.exchange import RequestFacts
from extproc.ledger.facts import DecisionRecord, NoDecision
from extproc.ledger.process_telemetry import process_text
from extproc.pages.decision_state import decision_state
from extproc.pages.findings import Finding
from extproc.pages.history_state import HistoryEvent
from extproc.pages.picker_state import DecisionState, ListedEndpoint, PickerState, PoolsState, PoolState
from extproc.pages.pool_pages import PoolPages
from extproc.pods.pod_ranks import pod_of
from extproc.policy.values import PickPolicy
from extproc.pools.plan_response import new_decision_id
from extproc.pools.pool import Pool
from extproc.pools.pools import Pools
from extproc.scaling.plan import Plan
from extproc.settings.shown_settings import ShownSettings
from kvmesh.blocks.source import IndexStatus
from kvmesh.errors import IndexUnavailableError
from kvmesh.index.index_view import IndexView
from kvmesh.metrics.exposition import Form
from kvmesh.metrics.registry import MetricsPage
from kvmesh.pods.page_turns import PageTurns
from kvmesh.pods.pod_key import PodKey

LISTED_ENDPOINTS = 2000  # in the state of all pools; each pool's own state lists all of its endpoints
NAMED_POOLS = 10  # in the error for an unknown pool
LONGEST_NAME = 200  # characters of a requested pool name, in an error

ExplainPolicies = Callable[[str | None], Awaitable[dict[str, Any]]]


class BadQueryError(KvmeshError):
    """A page's parameter is invalid or missing."""


class PickerPages:
    """The pages of all pools. `?pool=namespace/name` selects one; without it, the only one or a summary of all."""

    def __init__(
        self,
        pools: Pools,
        *,
        view: IndexView,
        policies: ExplainPolicies | None = None,
        pod_key: PodKey | None = None,
        name: str = "",
    ) -> None:
        """`pod_key` is the API key for pods, `name` the picker's name.

        `policies` explains which policies apply to a target. It is None with `--endpoints`, which form one pool, shown
        without a name.
        """
        self.ready = False
        self.name = name
        self.view = view
        # of the checks at start-up; None before they are done. They check only the pool of --endpoints
        self.findings: Sequence[Finding] | None = None if policies is None else ()
        self.settings: ShownSettings | None = None  # None if the picker does not show them
        self._pools = pools
        self._turns = PageTurns()
        self._policies = policies
        self._pod_key = pod_key
        self._pages: dict[str, PoolPages] = {}  # created on first use
        self._looking = asyncio.Lock()
        self._looked: tuple[float, IndexStatus | str] = (float("-inf"), "")

    # --- pools ----------------------------------------------------------------------------------------------------

    def reconfigure(self) -> None:
        """Adopt changes of pools or policies: drop prompt text at once if the policy no longer allows it."""
        known = self._pools.with_requests
        self._pages = {name: pages for name, pages in self._pages.items() if known.get(name) is pages.pool}
        for pages in self._pages.values():
            pages.prefixes.shows_text()

    def chosen(self, name: str | None) -> PoolPages | None:
        """Return the named or only pool, or None if none is named among several. Raise UnknownPoolError."""
        everything = self._pools.all
        if name and (self._policies is None or name not in everything):
            raise UnknownPoolError(f"the pool {name[:LONGEST_NAME]!r} is not known here; {self._known_pools()}")
        if not name and len(everything) != 1:
            return None
        return self._of(everything[name] if name else next(iter(everything.values())))

    def pages_of(self, name: str) -> PoolPages | None:
        """Return a pool's pages by its internal name."""
        found = self._pools.pool(name)
        return None if found is None else self._of(found)

    def named(self, name: str | None) -> PoolPages:
        """Return the named pool, or the only one. Raise UnknownPoolError, or BadQueryError if there are several."""
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
        """Return a pool's displayed name, "" for the pool of `--endpoints`."""
        return "" if self._policies is None else pages.pool.name

    def pools(self) -> list[PoolState]:
        """Return a line per pool, but none for the pool of `--endpoints`."""
        return [] if self._policies is None else [self._of(pool).line() for pool in self._pools.all.values()]

    async def index(self, pages: PoolPages, *, fresh_seconds: float = 0.0) -> IndexStatus | str:
        """Return the pool's part of the index, at most `fresh_seconds` old, or why it cannot be read.

        The pool of `--endpoints` gets the whole index, including other pods.
        """
        not_before = time.monotonic() - fresh_seconds
        async with self._looking:  # one look serves all concurrent callers
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
        addresses = {pod_of(status.address) for status in pages.statuses()}
        return replace(
            index,
            sources=tuple(line for line in index.sources if line.endpoint in addresses),
            findings=tuple(line for line in index.findings if line.endpoint in addresses),
        )

    # --- pages ----------------------------------------------------------------------------------------------------

    def readiness(self) -> tuple[bool, dict[str, Any]]:
        """Return whether the picker is ready for traffic, and all problems.

        Neither a missing index nor a pool without endpoints makes it unready: the picker serves what it can.
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
        """Return the metrics page.

        With --kubernetes or --policies, a pool's series have the label `pool`; pools without requests have no series.
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
        """Return the state of the named or only pool, or else a summary of all pools. Raise UnknownPoolError."""
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
        """Return the last 15 minutes of a pool. Raise UnknownPoolError, or BadQueryError if there are several."""
        return await self.history_of(self.named(pool))

    async def history_of(self, pages: PoolPages) -> HistoryEvent:
        """Return the last 15 minutes of a pool, computed in steps that let requests go first."""
        return await self._turns.read(pages.history(picker=self.name, pool=self.shown_name(pages)))

    def plans(self, *, seconds: float, pool: str | None = None) -> list[Plan]:
        """Return the desired pods of each pool, or of one, `seconds` from now. Raise UnknownPoolError."""
        chosen = self.chosen(pool)
        pages = [chosen] if chosen is not None else [self._of(each) for each in self._pools.all.values()]
        return [structs.replace(each.pool.scale.plan(seconds=seconds), pool=self.shown_name(each)) for each in pages]

    async def explain(self, facts: RequestFacts, body: bytes, *, pool: str | None = None) -> DecisionState:
        """Decide without booking, for the named pool or the pool of the request's host."""
        try:
            pages = self.chosen(pool) or self._of(self._pools.for_host(facts.headers.get("host", "")))
        except PickError as refusal:
            record = DecisionRecord(
                at=time.time(), id=new_decision_id(), facts=facts, model=None, outcome=NoDecision.of(refusal)
            )
            return decision_state(record, policy=PickPolicy())
        explanation = await pages.explain(facts, body, await self.index(pages))
        return structs.replace(explanation, pool=self.shown_name(pages) or None)

    async def policies(self, target: str | None) -> dict[str, Any]:
        """Return the policies of a target, or of all pools without one. Raise KvmeshError for an unknown target."""
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
