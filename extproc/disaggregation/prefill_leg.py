"""One prefill request to one pod: send it, wait until its deadline, read the answer.

It can be cancelled like any other call. This closes the connection, so that vLLM aborts the prompt and frees its blocks
at once. The answer contains one token, so more than a megabyte is an error; redirects are not followed.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Self

import msgspec

from extproc.choosing.endpoint_health import Outcome, outcome_of_headers
from extproc.disaggregation.leg_answers import LegAnswerError
from extproc.disaggregation.leg_body import prefill_body
from extproc.disaggregation.transfer_protocols import (
    Fields,
    LegNames,
    LegOutcome,
    TransferProtocol,
    engine_of,
)
from extproc.pods.pod_ranks import RANK_HEADER, pinned, pod_of
from extproc.requests.json_edit import JsonObject
from extproc.requests.request import InferenceRequest
from kvmesh.pods.http_response import HttpResponse, HttpResponseError
from kvmesh.pods.pod_http import PodPages

MOST_ANSWER_BYTES = 1 << 20
KEPT_CONNECTIONS = 32  # per pod; each concurrent prompt uses one
BOOTSTRAP_SECONDS = 2.0  # for the bootstrap server's page
OUTCOMES = {Outcome.FULL: LegOutcome.FULL, Outcome.NEITHER: LegOutcome.REFUSED}


class LegError(Exception):
    """A failed leg: `outcome` is its kind, the message the reason."""

    def __init__(self, outcome: LegOutcome, why: str) -> None:
        super().__init__(why)
        self.outcome = outcome


class LegRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of a client's request that its legs need."""

    request: InferenceRequest
    body: JsonObject  # for the decode pod, without transfer parameters
    headers: Mapping[str, str]

    def at_rank(self, endpoint: str, ranks: Mapping[str, Sequence[int]]) -> Self:
        """Return the request with the header for the endpoint's rank; `ranks`: pod -> its ranks."""
        _, header = pinned((endpoint,), ranks)
        return msgspec.structs.replace(self, headers={**self.headers, **header}) if header else self


async def run_leg(
    pages: PodPages,
    endpoint: str,
    asked: LegRequest,
    protocol: TransferProtocol,
    names: LegNames,
    *,
    timeout_seconds: float | None,
) -> Fields:
    """Have a prefill pod compute the prompt, and return the fields for the decode pod's body. Raise LegError."""
    try:
        async with asyncio.timeout(timeout_seconds):
            return await _run(pages, endpoint, asked, protocol, names)
    except TimeoutError:
        waited = "in time" if timeout_seconds is None else f"within {timeout_seconds:.3g} s"
        raise LegError(LegOutcome.TIMED_OUT, f"no answer {waited}") from None
    except (OSError, HttpResponseError) as error:
        raise LegError(LegOutcome.FAILED, str(error) or type(error).__name__) from None
    except LegAnswerError as error:
        raise LegError(LegOutcome.UNREADABLE, str(error)) from None


async def _run(
    pages: PodPages, endpoint: str, asked: LegRequest, protocol: TransferProtocol, names: LegNames
) -> Fields:
    headers = asked.headers
    if protocol.asks_bootstrap:
        # each time: a restarted pod has a new engine id, and a decode pod could not find the old one
        server = f"{names.host}:{names.bootstrap_port}"
        page = _content(
            await pages.get(server, "/query", timeout_seconds=BOOTSTRAP_SECONDS, max_body_bytes=MOST_ANSWER_BYTES)
        )
        names = msgspec.structs.replace(names, engine=(engine := engine_of(page, number=names.number)))
        if engine.rank is not None:
            headers = {**headers, RANK_HEADER: engine.rank}
    answer = await pages.post(
        pod_of(endpoint),
        asked.request.path,
        prefill_body(asked.request, asked.body, protocol, names),
        timeout_seconds=None,
        max_body_bytes=MOST_ANSWER_BYTES,
        headers=headers,
    )
    return protocol.hand_over(names, _content(answer))


def _content(answer: HttpResponse) -> bytes:
    if answer.status != 200:
        outcome = outcome_of_headers(answer.status, content_type="application/json")
        raise LegError(OUTCOMES.get(outcome, LegOutcome.FAILED), f"it answers {answer.status}")
    return answer.body
