"""What Redis' error replies mean."""

import pytest

from kvmesh.redis.protocol import ADVICE, Reaction, explained, reaction

READONLY = "READONLY You can't write against a read only replica."
OOM = "OOM command not allowed when used memory > 'maxmemory'."
# as Redis 6.2 and 7.0 say it of a script
IN_SCRIPT_6 = "ERR Error running script (call to f_8c): @user_script:1: @user_script: 1: -READONLY You can't write"
IN_SCRIPT_7 = "READONLY You can't write against a read only replica. script: 8c, on @user_script:1."


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        (OOM, ADVICE["OOM"]),
        (READONLY, ADVICE["READONLY"]),
        (IN_SCRIPT_6, ADVICE["READONLY"]),
        (IN_SCRIPT_7, ADVICE["READONLY"]),
        ("LOADING Redis is loading the dataset in memory", ADVICE["LOADING"]),
        ("MISCONF Redis is configured to save RDB snapshots, but", ADVICE["MISCONF"]),
        ("NOPERM this user has no permissions to run the 'evalsha' command", ADVICE["NOPERM"]),
        ("ERR max number of clients reached", "raise maxclients there"),
    ],
)
def test_a_refusal_comes_with_what_to_do(text: str, advice: str) -> None:
    assert explained(text) == f"{text} ({advice})"


def test_arguments_that_redis_repeats_are_cut_off() -> None:
    text = "ERR unknown command `AUTH`, with args beginning with: `me`, `s3cret`, "

    assert explained(text).partition(" (")[0] == "ERR unknown command `AUTH`"


def test_a_strange_refusal_is_shown_as_it_is() -> None:
    assert explained("ERR something new") == "ERR something new"


@pytest.mark.parametrize(
    ("text", "in_cluster", "expected"),
    [
        (READONLY, False, Reaction.LEAVE),
        (IN_SCRIPT_6, False, Reaction.LEAVE),
        ("MASTERDOWN Link with MASTER is down", False, Reaction.LEAVE),
        ("NOAUTH Authentication required.", False, Reaction.LEAVE),
        ("MOVED 8052 10.0.0.1:6379", True, Reaction.FOLLOW),
        ("MOVED 8052 10.0.0.1:6379", False, Reaction.STAY),
        ("CLUSTERDOWN The cluster is down", True, Reaction.LEAVE),
        ("ASK 8052 10.0.0.1:6379", True, Reaction.STAY),
        ("TRYAGAIN Multiple keys request during rehashing of slot", True, Reaction.STAY),
        ("LOADING Redis is loading the dataset in memory", True, Reaction.STAY),
        (OOM, True, Reaction.STAY),
        ("NOSCRIPT No matching script.", False, Reaction.STAY),
    ],
)
def test_only_a_wrong_server_is_left(text: str, in_cluster: bool, expected: Reaction) -> None:
    assert reaction(text, in_cluster=in_cluster) is expected
