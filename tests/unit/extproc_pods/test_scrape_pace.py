"""How often endpoints are scraped."""

from extproc.pods.scrape_pace import ScrapePace


def test_a_few_endpoints_are_scraped_as_often_as_is_asked_for() -> None:
    pace = ScrapePace()
    pace.endpoints = 200
    assert (pace.interval(0.2), pace.models_interval(5.0)) == (0.2, 5.0)
    assert pace.stale_after(2.0, interval_seconds=0.2) == 2.0


def test_with_many_endpoints_each_is_scraped_less_often_so_that_all_cost_the_same() -> None:
    pace = ScrapePace()
    pace.endpoints = 2000
    assert (pace.interval(0.2), pace.models_interval(5.0)) == (2.0, 40.0)
    assert pace.stale_after(2.0, interval_seconds=2.0) == 6.0


def test_pools_without_requests_leave_the_scrapes_to_those_with() -> None:
    pace = ScrapePace(rests=True)
    pace.endpoints, pace.busy = 2000, 10
    assert (pace.interval(0.2), pace.models_interval(5.0)) == (0.2, 5.0)
    assert (pace.interval(0.2, idle=True), pace.models_interval(5.0, idle=True)) == (250.0, 300.0)


def test_an_idle_pool_is_still_looked_at() -> None:
    pace = ScrapePace(rests=True)
    pace.endpoints = 100_000
    assert (pace.interval(0.2, idle=True), pace.models_interval(5.0, idle=True)) == (250.0, 300.0)
    assert pace.interval(5.0) == 5.0


def test_a_few_idle_endpoints_are_scraped_once_a_second() -> None:
    pace = ScrapePace(rests=True)
    pace.endpoints = 3
    assert pace.interval(0.2, idle=True) == 1.0
