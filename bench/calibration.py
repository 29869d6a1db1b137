"""How fast this machine is at this moment: the CPU time of one loop that never changes.

Cores that are shared with strangers change their speed within a minute; two results are comparable only where this
loop took the same time in both.
"""

import time

ITERATIONS = 200_000


def loop_ns_per_iteration(iterations: int = ITERATIONS) -> float:
    """CPU nanoseconds of this thread for one addition of two small integers in pure Python."""
    began = time.thread_time_ns()
    total = 0
    for number in range(iterations):
        total += number & 255
    return (time.thread_time_ns() - began) / iterations
