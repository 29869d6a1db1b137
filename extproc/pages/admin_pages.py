"""What the admin pages show: readiness, metrics, the state, explanations. Changes nothing; wired by `service`."""

import asyncio
import random
import time
from collections.abc import Sequence
from itertools import islice
from typing import Any

from extproc.admission.asked_request import LONGEST_NAME
from extproc.choosing.candidates import unhealthy_endpoints
from extproc.choosing.choose import any_request
from extproc.doctor.findings import Finding, Severity
from extproc.errors import (
    NoPoliciesError,
    PickError,
    PrefixIndexUnavailableError,
    UnknownPoolError,
)
from extproc.ext_proc.exchange import RequestFacts
from extproc.pages.admin_json import (
    admission_json,
    classes_json,
    decision_json,
    endpoint_json,
    explanation_json,
    record_json,
    refusal_json,
    state_json,
)
from extproc.pages.live_json import PoolFacts
from extproc.pages.prefix_watch import PrefixWatch
from extproc.pick import explain
from extproc.policy.values import PickPolicy
from extproc.pools.pool import Pool
from extproc.prefixes.prefix_index import NO_INDEXER
from kvmesh.blocks.source import SourceStatus

SHOWN_DECISIONS = 50  # on the page of the state
ADMIN_INDEX_TIMEOUT_SECONDS = 1.0


class PickerPages:
    """Implements `admin_http.AdminPages` for one pool; all but the prefix tree is read from its picker when asked."""

    def __init__(self, pool: Pool) -> None:
        self.ready = False
        self.findings: Sequence[Finding] | None = None  # of the checks at start-up; None: not done yet
        self.pool = pool
        self._prefixes = PrefixWatch(
            shows_text=self.policy.observability.show_prompt_text, clock=time.monotonic, random=random.random
        )

    @property
    def policy(self) -> PickPolicy:
        """The policy in force."""
        return self.pool.config.policy

    @property
    def prefixes(self) -> PrefixWatch:
        """The prefixes that were routed lately, with text only while the policy in force shows it."""
        self._prefixes.reconfigure(shows_text=self.policy.observability.show_prompt_text)
        return self._prefixes

    def reconfigure(self) -> None:
        """Forget the text of prompts at once where the policy in force does not show it any more."""
        self._prefixes.reconfigure(shows_text=self.policy.observability.show_prompt_text)

    def readiness(self) -> tuple[bool, dict[str, Any]]:
        """Return whether traffic may come. A missing index does not count: the picker serves without it."""
        facts = {
            "endpoint_problems": self.pool.endpoints.problems(),
            "index_problem": self.pool.index.problem,
            "render_problems": self.pool.render.problems(),
            "tokenizers": self.pool.prompts.engines(),
        }
        return self.ready, facts

    async def metrics(self) -> bytes:
        """Return Prometheus text."""
        return await self.pool.telemetry.page(ready=self.ready)

    def pools(self) -> list[dict[str, Any]]:
        """Return none: the pods of `--endpoints` are no pool of anybody's."""
        return []

    async def policies(self, target: str | None) -> dict[str, Any]:
        """Say that there are none."""
        raise NoPoliciesError(f"no policies are followed here (--kubernetes, --policies), hence none for {target}")

    async def state(self, *, pool: str | None = None) -> dict[str, Any]:  # noqa: ARG002 - there is one
        """Return endpoints, index, replicas and recent decisions."""
        sources, index = await self._index_state()
        blocks: dict[str, int] = {}
        for source in sources:
            blocks[source.endpoint] = blocks.get(source.endpoint, 0) + source.cached_blocks
        facts = self.facts()
        all_picks = sum(facts.picks.values())
        return state_json(
            now=facts.now,
            endpoints=[
                endpoint_json(
                    status,
                    cached_blocks=blocks.get(status.address, 0),
                    bookings=facts.bookings.get(status.address, 0),
                    picks=facts.picks.get(status.address, 0),
                    all_picks=all_picks,
                    avoided=facts.avoided.get(status.address),
                )
                for status in facts.statuses
            ],
            index=index,
            classes=classes_json(self.policy.priorities, waiting=facts.waiting, steps=facts.steps),
            estimate_errors=facts.estimate_errors,
            quotas=facts.quotas,
            replicas=facts.replicas,
            findings=facts.findings,
            decisions=[decision_json(record) for record in islice(self.pool.runtime.recent, SHOWN_DECISIONS)],
        )

    # --- for the live feed ----------------------------------------------------------------------------------------

    def chosen(self, pool: str | None) -> "tuple[str, PickerPages] | None":
        """Return the pool of `--endpoints`, which has no name. Raise UnknownPoolError for any other."""
        if pool:
            raise UnknownPoolError(f"the pool {pool[:LONGEST_NAME]!r} is not known here")
        return "", self

    def pages_of(self, pool: str) -> "PickerPages | None":
        """Return the pages of a pool."""
        return None if pool else self

    def facts(self, *, pool: str = "") -> PoolFacts:
        """Return everything about the pool that needs nobody's answer."""
        books, now = self.pool.books, time.monotonic()
        statuses = self.pool.endpoints.known(now=now)
        return PoolFacts(
            name=pool,
            policy=self.policy,
            now=time.time(),
            monotonic=now,
            statuses=statuses,
            avoided=unhealthy_endpoints(statuses, health=books.health, policy=self.policy, now=now),
            bookings=books.bookings.by_endpoint(),
            picks=books.picks,
            estimate_errors=books.estimates.errors(),
            waiting=self.pool.runtime.admission.waiting,
            steps=self.pool.degradation.in_force(now=now),
            quotas=self.pool.quotas.facts(),
            replicas=books.shared.facts() if books.shared is not None else None,
            findings=self.findings,
            own_findings=self._own_findings(),
            recent=self.pool.runtime.recent,
        )

    def prompt_text(self, model: str, tokens: bytes) -> str | None:
        """Return the text of token ids, None where no tokenizer of the model is here."""
        tokenizer = self.pool.prompts.tokenizers.get(model)
        return tokenizer.text(tokens) if tokenizer is not None else None

    def _own_findings(self) -> list[Finding]:
        """Return which predictions never come true: what has been said in the log, too."""
        books = self.pool.books
        found = [(finding.reason, where, finding.message) for where, finding in books.matches.findings.items()]
        found += [(finding.reason, model, finding.message) for model, finding in books.realised_watch.findings.items()]
        return [
            Finding(check=reason, severity=Severity.ERROR, subject=subject, seen=message)
            for reason, subject, message in found
        ]

    # --------------------------------------------------------------------------------------------------------------

    def decisions(
        self,
        *,
        limit: int,
        request_id: str | None,
        pool: str | None = None,  # noqa: ARG002 - there is one
    ) -> list[dict[str, Any]]:
        """Return the last decisions with all that they rest on, newest first."""
        wanted = (
            record for record in self.pool.runtime.recent if request_id is None or record.facts.request_id == request_id
        )
        return [record_json(record, policy=self.policy) for record in islice(wanted, limit)]

    async def explain(
        self,
        facts: RequestFacts,
        body: bytes,
        *,
        pool: str | None = None,  # noqa: ARG002 - there is one
    ) -> dict[str, Any]:
        """Decide without booking, and return what the decision rests on."""
        sources, _ = await self._index_state()
        try:
            picked, preview = await explain(facts, body, self.pool.runtime)
        except PickError as refusal:
            return refusal_json(refusal, any_request(self.pool.runtime.view, now=time.monotonic()))
        explanation = explanation_json(
            picked.prepared.summary,
            picked.decision,
            policy=self.policy,
            blocks={source.endpoint: source.block_size for source in sources if source.block_size},
            rooms=preview.rooms,
        )
        return explanation | {"admission": admission_json(picked.prepared.asked.request_class, preview)}

    async def _index_state(self) -> tuple[Sequence[SourceStatus], dict[str, Any]]:
        """Return the index's sources, none where it cannot be read, and its state for the page."""
        try:
            async with asyncio.timeout(ADMIN_INDEX_TIMEOUT_SECONDS):
                status = await self.pool.index.status()
        except (PrefixIndexUnavailableError, TimeoutError) as error:
            return (), {"state": "unavailable", "problem": str(error) or "no answer in time", "sources": 0}
        problem = None if status.indexer_alive else NO_INDEXER
        state = {"state": "stale" if problem else "ok", "problem": problem, "sources": len(status.sources)}
        return status.sources, state
