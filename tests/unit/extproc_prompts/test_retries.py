"""When something that has failed is tried again."""

from extproc.prompts.retries import FIRST_SECONDS, MOST_SECONDS, Retries


def test_each_failure_doubles_the_wait_up_to_the_longest() -> None:
    retries, now, waits = Retries(), 100.0, []
    assert retries.is_due(now)
    for _ in range(9):
        retries.failed(now)
        before = now
        while not retries.is_due(now):
            now += FIRST_SECONDS
        waits.append(now - before)
    assert waits == [5, 10, 20, 40, 80, 160, MOST_SECONDS, MOST_SECONDS, MOST_SECONDS]
