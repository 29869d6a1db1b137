"""Wrong tokens are counted by address, within bounds."""

from kvmesh.admin.admin_access import REMEMBERED_ADDRESSES, SECONDS_A_TRY, TRIES_AT_ONCE, FailedTokens

ME, OTHER = "10.0.0.1", "10.0.0.2"


def _fail(failed: FailedTokens, address: str, times: int, *, now: float = 0.0) -> None:
    for i in range(times):
        failed.failed(address, f"{now} {i}".encode(), now=now)


def test_who_shows_many_wrong_tokens_waits_and_nobody_else_does() -> None:
    failed = FailedTokens()
    _fail(failed, ME, TRIES_AT_ONCE - 1)
    assert failed.wait_seconds(ME, now=0) == 0
    _fail(failed, ME, 1, now=0.0001)
    assert failed.wait_seconds(ME, now=0.0001) == SECONDS_A_TRY
    assert failed.wait_seconds(OTHER, now=0.0001) == 0


def test_waiting_ends_with_time_one_try_after_another() -> None:
    failed = FailedTokens()
    _fail(failed, ME, TRIES_AT_ONCE)
    assert failed.wait_seconds(ME, now=SECONDS_A_TRY - 1) == 1
    assert failed.wait_seconds(ME, now=SECONDS_A_TRY) == 0
    assert failed.failed(ME, b"one more", now=SECONDS_A_TRY)
    assert failed.wait_seconds(ME, now=SECONDS_A_TRY) == SECONDS_A_TRY


def test_the_same_wrong_token_again_is_no_guess() -> None:
    failed = FailedTokens()
    assert [failed.failed(ME, b"old", now=float(i)) for i in range(3)] == [True, False, False]
    for i in range(1000):
        failed.failed(ME, b"old", now=i / 1000)
    assert failed.wait_seconds(ME, now=1.0) == 0


def test_a_few_old_settings_at_one_address_lock_nobody_out() -> None:
    failed = FailedTokens()
    for i in range(1000):
        for old in (b"of last year", b"of last month", b"of yesterday"):
            failed.failed(ME, old, now=i / 1000)
    assert failed.wait_seconds(ME, now=1.0) == 0


def test_who_goes_round_through_many_wrong_tokens_waits() -> None:
    failed = FailedTokens()
    for i in range(10 * TRIES_AT_ONCE):
        failed.failed(ME, bytes([i % (TRIES_AT_ONCE + 1)]), now=0.0)
    assert failed.wait_seconds(ME, now=0.0) > SECONDS_A_TRY


def test_one_machines_ipv6_addresses_count_as_one() -> None:
    failed = FailedTokens()
    for i in range(TRIES_AT_ONCE):
        failed.failed(f"2001:db8::{i:x}", bytes([i]), now=0)
    assert failed.wait_seconds("2001:db8::ffff%eth0", now=0) == SECONDS_A_TRY
    assert failed.wait_seconds("2001:db8:0:1::1", now=0) == 0


def test_no_more_addresses_than_the_bound_are_remembered() -> None:
    failed = FailedTokens()
    for i in range(REMEMBERED_ADDRESSES * 2):
        failed.failed(f"10.0.{i // 256}.{i % 256}", b"guess", now=float(i))
    assert len(failed) == REMEMBERED_ADDRESSES
