"""The classes' inter-token targets that affect routing. Pure.

Only a class's explicit target (`classes[].interTokenSeconds`) counts here. The default target of its tolerance is
measured, but keeps no requests away from a pod.
"""

from collections.abc import Mapping
from math import inf

import msgspec

from extproc.policy.request_class import PriorityPolicy


class StreamPromises(msgspec.Struct, frozen=True, kw_only=True):
    """The inter-token targets of one pool's classes."""

    seconds: Mapping[str, float] = {}  # class -> target mean inter-token time, only of classes with a target
    priorities: Mapping[str, int] = {}  # of all classes
    tightest_seconds: float = inf  # of all classes
    highest_priority: int = -(2**31)

    def is_low(self, class_name: str) -> bool:
        """Tell whether some other class is more important."""
        return self.priorities.get(class_name, self.highest_priority) < self.highest_priority


NO_PROMISES = StreamPromises()


def stream_promises(policy: PriorityPolicy) -> StreamPromises:
    """Return the inter-token targets of a policy's classes."""
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
