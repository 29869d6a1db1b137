"""One request to one prefill pod: sent, awaited until its deadline, and read.

It is cancelled like any other call: the connection is closed then, by which vLLM aborts the prompt and frees its blocks
at once. A pod's answer has only a token in it, so that more than a megabyte is no answer; redirects are not followed.
"""

import asyncio
from collections.abc import Mapping

import msgspec

from extproc.disaggregation.leg_body import prefill_body
from extproc.disaggregation.transfer_protocols import (
    RANK_HEADER,
    Fields,
    LegAnswerError,
    LegNames,
    LegOutcome,
    TransferProtocol,
    engine_of,
)
from extproc.requests.json_edit import JsonObject
from extproc.requests.request import InferenceRequest
from kvmesh.pods.http_response import HttpResponse, HttpResponseError
from kvmesh.pods.pod_http import PodPages

MOST_ANSWER_BYTES = 1 << 20
KEPT_CONNECTIONS = 32  # a pod; prompts that are computed at the same time have one each
BOOTSTRAP_SECONDS = 2.0  # for the bootstrap server's page
BUSY = 503


class LegError(Exception):
    """A leg that brought nothing: `outcome` says what kind, the words why."""

    def __init__(self, outcome: LegOutcome, why: str) -> None:
        super().__init__(why)
        self.outcome = outcome


class LegRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A client's request, as far as its legs need it."""

    request: InferenceRequest
    body: JsonObject  # for the decode pod, without parameters
    headers: Mapping[str, str]


async def run_leg(
    pages: PodPages,
    endpoint: str,
    asked: LegRequest,
    protocol: TransferProtocol,
    names: LegNames,
    *,
    timeout_seconds: float | None,
) -> Fields:
    """Have a prefill pod compute the prompt, and return what the decode pod's body gets. Raise LegError."""
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
        # each time: after a restart the pod has another name, and a decode pod could not find the old one
        server = f"{names.host}:{names.bootstrap_port}"
        page = _content(
            await pages.get(server, "/query", timeout_seconds=BOOTSTRAP_SECONDS, max_body_bytes=MOST_ANSWER_BYTES)
        )
        names = msgspec.structs.replace(names, engine=(engine := engine_of(page, number=names.number)))
        if engine.rank is not None:
            headers = {**headers, RANK_HEADER: engine.rank}
    answer = await pages.post(
        endpoint,
        asked.request.path,
        prefill_body(asked.request, asked.body, protocol, names),
        timeout_seconds=None,
        max_body_bytes=MOST_ANSWER_BYTES,
        headers=headers,
    )
    return protocol.hand_over(names, _content(answer))


def _content(answer: HttpResponse) -> bytes:
    if answer.status != 200:
        raise LegError(_outcome_of(answer.status), f"it answers {answer.status}")
    return answer.body


def _outcome_of(status: int) -> LegOutcome:
    if status == BUSY:
        return LegOutcome.FULL
    return LegOutcome.REFUSED if 400 <= status < 500 else LegOutcome.FAILED
