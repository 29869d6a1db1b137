"""What is measured: pods, link, mixes, fleets, arms, and the promises that goodput counts by.

One pod is about an 8B model on a large GPU: 8,000 prompt tokens/s, 12 ms a token, 131,072 bytes of cache a token.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from extproc.policy.disaggregation import Disaggregation, OffloadRule
from podsim.core.link import LinkSettings
from podsim.core.scheduler import EngineSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of request; each number is drawn between two."""

    share: float  # of the sessions
    prompt_tokens: tuple[int, int]  # of the first turn; later ones add `question_tokens` to all that was said
    answer_tokens: tuple[int, int]
    answer_share: float | None = None  # of the prompt, in place of `answer_tokens`
    turns: int = 1
    question_tokens: tuple[int, int] = (50, 200)


LONG_PROMPTS = Kind(share=1.0, prompt_tokens=(2000, 8000), answer_tokens=(0, 0), answer_share=1 / 8)
SHORT_CHATS = Kind(share=1.0, prompt_tokens=(100, 500), answer_tokens=(200, 800))
LONG_CHATS = Kind(share=1.0, prompt_tokens=(2000, 4000), answer_tokens=(150, 400), turns=5)


def _mixed(*, long: float, short: float, chats: float) -> Mapping[str, Kind]:
    return {
        "long": replace(LONG_PROMPTS, share=long),
        "short": replace(SHORT_CHATS, share=short),
        "chat": replace(LONG_CHATS, share=chats),
    }


MIXES: Mapping[str, Mapping[str, Kind]] = MappingProxyType(
    {
        "prefill-heavy": _mixed(long=0.90, short=0.05, chats=0.05),
        "balanced": _mixed(long=0.30, short=0.60, chats=0.10),
        "decode-heavy": _mixed(long=0.06, short=0.87, chats=0.07),
    }
)
FLEETS = (1, 2, 3)  # prefill pods; the others decode
BOTH, NEVER, ESTIMATE = "both", "never", "estimate"  # names of arms
ARMS: Mapping[str, Disaggregation] = MappingProxyType(
    {
        BOTH: Disaggregation(),  # no pod has a role
        NEVER: Disaggregation(),
        "always": Disaggregation(enabled=True, rule=OffloadRule.ALWAYS),
        "thresholds": Disaggregation(enabled=True, rule=OffloadRule.THRESHOLDS),
        ESTIMATE: Disaggregation(enabled=True),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One run of the benchmark."""

    engine: EngineSettings = field(
        default_factory=lambda: EngineSettings(
            total_blocks=12_288, max_running=32, max_step_tokens=2048, inter_token_seconds=0.012
        )
    )
    link: LinkSettings = field(default_factory=LinkSettings)
    pods: int = 4
    load: float = 0.75  # of what the pods can compute where each does both
    warm_seconds: float = 10.0  # not measured
    seconds: float = 50.0  # of arrivals
    think_seconds: tuple[float, float] = (2.0, 6.0)  # from an answer's due end to the chat's next turn
    first_seed: int = 1
    seeds: int = 3
    ttft_limit_seconds: float = 2.0
    inter_token_limit_seconds: float = 0.03  # mean of a request


STANDARD = Plan()
QUICK = Plan(seconds=25.0, seeds=1)
