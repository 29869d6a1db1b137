"""Which tenants got less than another."""

from extproc.admission.pressure_memory import MOST_TENANTS, SHARE_SECONDS, TenantShares


def test_who_got_less_than_another_is_behind_and_who_got_most_is_not() -> None:
    shares = TenantShares()
    shares.went("flood", 1000, now=0.0)
    shares.went("steady", 900, now=1.0)  # and 905 are left of the other's
    assert [shares.is_behind(name, now=1.0) for name in ("flood", "steady", "new")] == [False, True, True]
    shares.went("steady", 100, now=2.0)
    assert [shares.is_behind(name, now=9.0) for name in ("flood", "steady", "new")] == [True, False, True]


def test_a_tenant_that_is_alone_is_not_behind() -> None:
    shares = TenantShares()
    assert not shares.is_behind("only", now=0.0)
    for number in range(200):
        shares.went("only", 7, now=number * 0.37)
        assert not shares.is_behind("only", now=number * 0.37 + 0.2)


def test_what_was_long_ago_counts_no_longer() -> None:
    shares = TenantShares()
    shares.went("early", 100_000, now=0.0)
    shares.went("late", 10, now=12 * SHARE_SECONDS)
    assert (shares.is_behind("early", now=12 * SHARE_SECONDS), shares.is_behind("late", now=12 * SHARE_SECONDS)) == (
        True,
        False,
    )


def test_ever_new_tenants_take_no_more_room() -> None:
    shares = TenantShares()
    for number in range(2 * MOST_TENANTS):
        shares.went(f"tenant {number}", 10, now=number * 0.001)
        shares.went("regular", 5, now=number * 0.001)
    assert len(shares._sent) == MOST_TENANTS
    assert not shares.is_behind("regular", now=2.0)
