"""One request to one prefill pod: sent, awaited until its deadline, and read.

It is cancelled like any other call: the connection is closed then, by which vLLM aborts the prompt and frees its blocks
at once. A pod's answer has only a token in it, so that more than a megabyte is no answer; redirects are not followed.
"""

from collections.abc import Mapping

from extproc.disaggregation.transfer_protocols import LegAnswerError, LegOutcome, TransferParameters, read_answer
from kvmesh.pods.http_response import HttpResponseError
from kvmesh.pods.pod_http import PodPages

MOST_ANSWER_BYTES = 1 << 20
KEPT_CONNECTIONS = 32  # a pod; prompts that are computed at the same time have one each
BUSY = 503


class LegError(Exception):
    """A leg that brought nothing: `outcome` says what kind, the words why."""

    def __init__(self, outcome: LegOutcome, why: str) -> None:
        super().__init__(why)
        self.outcome = outcome


async def run_leg(
    pages: PodPages, endpoint: str, path: str, body: bytes, *, headers: Mapping[str, str], timeout_seconds: float
) -> TransferParameters:
    """Have a prefill pod compute the prompt, and return where its blocks are. Raise LegError."""
    try:
        answer = await pages.post(
            endpoint,
            path,
            body,
            timeout_seconds=timeout_seconds,
            max_body_bytes=MOST_ANSWER_BYTES,
            headers=headers,
        )
    except TimeoutError:
        raise LegError(LegOutcome.TIMED_OUT, f"no answer within {timeout_seconds:.3g} s") from None
    except (OSError, HttpResponseError) as error:
        raise LegError(LegOutcome.FAILED, str(error) or type(error).__name__) from None
    if answer.status != 200:
        raise LegError(_outcome_of(answer.status), f"it answers {answer.status}")
    try:
        return read_answer(answer.body)
    except LegAnswerError as error:
        raise LegError(LegOutcome.UNREADABLE, str(error)) from None


def _outcome_of(status: int) -> LegOutcome:
    if status == BUSY:
        return LegOutcome.FULL
    return LegOutcome.REFUSED if 400 <= status < 500 else LegOutcome.FAILED
