"""Whose a host is."""

from extproc.reach.hosts import HostClaim, LostClaim, SettledHosts, read_hosts, settle_hosts
from extproc.reach.status import Standing


def claim(
    host: str,
    pool: str,
    source: str,
    created_at: str | None = "2026-01-01T00:00:00Z",
    standing: Standing = Standing.NEW,
) -> HostClaim:
    return HostClaim(host=host, pool=pool, source=source, created_at=created_at, standing=standing)


def test_a_claim_in_force_comes_before_a_new_one_and_that_before_a_lost_one() -> None:
    lost = claim("x.com", "a/lost", "a/p1", "2026-01-01T00:00:00Z", Standing.LOST)
    new = claim("x.com", "a/new", "a/p2", "2026-01-02T00:00:00Z")
    held = claim("x.com", "a/held", "a/p3", "2026-01-03T00:00:00Z", Standing.IN_FORCE)
    assert settle_hosts([lost, new, held]).by_pool == {"a/held": {"x.com"}}
    assert settle_hosts([lost, new]).by_pool == {"a/new": {"x.com"}}


def test_of_new_claims_a_host_goes_to_that_of_the_oldest_object_then_to_the_first_by_name() -> None:
    young = claim("x.com", "a/young", "a/p1", "2026-02-01T00:00:00Z")
    ageless = claim("x.com", "a/file", "a/p0", None)
    old = claim("x.com", "a/old", "a/p2")
    peer = claim("x.com", "a/peer", "a/p3")
    assert settle_hosts([young, ageless, old, peer]) == SettledHosts(
        by_pool={"a/old": frozenset({"x.com"})},
        lost=tuple(LostClaim(claim=each, winner="a/p2") for each in (young, ageless, peer)),
    )


def test_who_claims_the_same_host_for_the_same_pool_loses_nothing() -> None:
    claims = [claim("x.com", "a/one", "a/p1"), claim("x.com", "a/one", "InferencePool a/one")]
    assert settle_hosts(claims) == SettledHosts(by_pool={"a/one": frozenset({"x.com"})}, lost=())


def test_a_policy_that_claims_a_host_for_several_pools_gets_it_for_none() -> None:
    claims = [claim("x.com", "a/one", "a/p"), claim("x.com", "a/two", "a/p")]
    assert settle_hosts(claims) == SettledHosts(
        by_pool={}, lost=tuple(LostClaim(claim=each, winner="") for each in claims)
    )


def test_the_annotation_is_split_into_hosts_and_what_is_none() -> None:
    text = " A.example.com:443,*.b.example.com , a.example.com,, -x, *, a..b, " + "x" * 300
    assert read_hosts(text) == (("a.example.com", "*.b.example.com"), ("-x", "*", "a..b", "x" * 300))
    assert read_hosts("") == ((), ())
