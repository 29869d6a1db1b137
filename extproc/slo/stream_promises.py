"""What classes are promised of the inter-token time, as far as it decides where requests go. Pure.

Only what a class says itself (`classes[].interTokenSeconds`): what its tolerance stands for is a target that is
counted, and no reason to keep requests away from a pod.
"""

from collections.abc import Mapping
from math import inf

import msgspec

from extproc.policy.priority import PriorityPolicy


class StreamPromises(msgspec.Struct, frozen=True, kw_only=True):
    """Of the classes of one pool."""

    seconds: Mapping[str, float] = {}  # class -> promised mean inter-token time; classes without are left out
    priorities: Mapping[str, int] = {}  # of all classes
    tightest_seconds: float = inf  # of all classes
    highest_priority: int = -(2**31)

    def is_low(self, class_name: str) -> bool:
        """Tell whether another class is more important."""
        return self.priorities.get(class_name, self.highest_priority) < self.highest_priority


NO_PROMISES = StreamPromises()


def stream_promises(policy: PriorityPolicy) -> StreamPromises:
    """Return what the classes of a policy are promised."""
    seconds = {
        name: each.inter_token_seconds for name, each in policy.classes.items() if each.inter_token_seconds is not None
    }
    priorities = {name: each.priority for name, each in policy.classes.items()}
    return StreamPromises(
        seconds=seconds,
        priorities=priorities,
        tightest_seconds=min(seconds.values(), default=inf),
        highest_priority=max(priorities.values(), default=NO_PROMISES.highest_priority),
    )
