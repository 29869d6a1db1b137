"""What Redis' error replies mean: what to do about them, and whether this connection is still the right one. Pure.

Used by the link and what it stands on. Words: https://redis.io/docs/latest/develop/reference/protocol-spec/ and the
servers' sources; in scripts, Redis 6 hides the word behind `ERR Error running script …: -WORD …`.
"""

import re
from enum import Enum

LIMIT = 300  # characters of a reply that a message repeats
_IN_SCRIPT = re.compile(r"-([A-Z]{3,}) ")


class Reaction(Enum):
    """What the link does with a connection that brought an error."""

    STAY = "stay"
    LEAVE = "leave"  # look for the right server anew
    FOLLOW = "follow"  # the reply names the right server


ADVICE = {
    "LOADING": "it reads its data from disk; it will answer when that is done",
    "OOM": "its memory is full: raise maxmemory (docs/redis.md says how much the index takes)",
    "READONLY": "it is a replica: looking for the master",
    "MASTERDOWN": "it is a replica that has lost its master: looking for the master",
    "NOAUTH": "it wants a password: give --redis-password-file",
    "WRONGPASS": "user or password is wrong: see --redis-username and --redis-password-file",
    "NOPERM": "the user may not do this: docs/redis-connection.md lists what it needs",
    "MISCONF": "it cannot save to disk and so refuses writes: mend that, or switch saving off (CONFIG SET save ''), "
    "which the index does not need",
    "NOREPLICAS": "too few replicas are connected to it (min-replicas-to-write)",
    "BUSY": "a script keeps it busy",
    "CLUSTERDOWN": "the cluster cannot serve now: see CLUSTER INFO",
    "TRYAGAIN": "the cluster is moving the index's slot; it can be used again when the move has ended",
    "ASK": "the cluster is moving the index's slot; it can be used again when the move has ended",
    "MOVED": "this is a Redis Cluster: give its nodes as redis+cluster://HOST:PORT,…",
    "DENIED": "its protected mode refuses other machines: set a password or bind an address there",
}
_BY_TEXT = (
    ("max number of clients", "raise maxclients there"),
    ("cluster support disabled", "it is no cluster: use redis:// or redis+sentinel://"),
    ("without any password configured", "it has no password: leave ours out"),
    ("DB index is out of range", "it has fewer databases"),
    ("unknown command", "it is an older Redis, a Sentinel, or a proxy that does not pass everything on"),
)


def refusal_word(text: str) -> str:
    """Return the error's word, such as READONLY; `ERR` where it has none of its own."""
    word = text.partition(" ")[0]
    if word == "ERR" and (inner := _IN_SCRIPT.search(text)):
        return inner[1]
    return word


def explained(text: str) -> str:
    """Return the reply with what to do about it. Arguments that Redis repeats may be secrets and are cut off."""
    shown = text.partition(", with args")[0][:LIMIT]
    by_text = next((advice for part, advice in _BY_TEXT if part in text), "")
    advice = ADVICE.get(refusal_word(text), by_text)
    return f"{shown} ({advice})" if advice else shown


def reaction(text: str, *, in_cluster: bool) -> Reaction:
    """Say what the error means for the connection that brought it.

    ASK is not followed: our scripts name one key and touch many, so on the target of a slot that is being moved they
    would find half an index and start another one. Redis answers all of them with ASK until the move has ended.
    """
    match refusal_word(text):
        case "MOVED" if in_cluster:
            return Reaction.FOLLOW
        case "CLUSTERDOWN" if in_cluster:
            return Reaction.LEAVE
        case "READONLY" | "MASTERDOWN" | "NOAUTH":
            return Reaction.LEAVE
        case _:
            return Reaction.STAY
