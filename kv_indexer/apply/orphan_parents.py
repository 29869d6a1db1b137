"""Finds lost parents of a stream's orphans in what other streams hold.

Where engine hashes are content-addressed (vLLM >= 0.29 by default) another pod's block of the same hash has the same
key. A pod can say anything, so one pod's word is not enough for another's blocks.
"""

from collections.abc import Mapping
from collections.abc import Set as AbstractSet

from kv_indexer.ports import IndexWriter
from kvmesh.blocks.source import Stream

WITNESSES_NEEDED = 2  # hosts that agree on a block's key


class ParentSearch:
    """Asks the index for one stream."""

    def __init__(self, *, stream: Stream, writer: IndexWriter) -> None:
        self._stream = stream
        self._writer = writer
        self._verdicts: dict[Stream, tuple[int, bool]] = {}  # other -> (its epoch, whether its hashes are ours)

    def forget(self) -> None:
        """Drop the verdicts: they were about what the stream held before."""
        self._verdicts.clear()

    async def find(self, wanted: AbstractSet[int], witnesses: Mapping[int, bytes]) -> dict[int, bytes]:
        """Return engine hash -> block key for those wanted whose key is certain.

        `witnesses` are blocks whose keys we have computed from their own tokens. A stream is heard if it has at least
        one of these under the same key, and none under another. What it says of a block counts if it is a rank of our
        own pod, or if a second host says the same; and only if nobody heard says something else.
        """
        heard: dict[int, dict[bytes, set[str]]] = {}
        elsewhere = await self._writer.find_block_keys_elsewhere(self._stream, wanted | witnesses.keys())
        for other, keys in elsewhere.items():
            found = wanted & keys.keys()
            if found and await self._is_heard(other, keys, witnesses):
                for parent in found:
                    heard.setdefault(parent, {}).setdefault(keys[parent], set()).add(other.endpoint)
        return {
            parent: key
            for parent, said in heard.items()
            for key, endpoints in said.items()
            if len(said) == 1 and self._is_certain(endpoints)
        }

    async def _is_heard(self, other: Stream, keys: Mapping[int, bytes], witnesses: Mapping[int, bytes]) -> bool:
        position = await self._writer.read_position(other)
        if position is None:
            return False
        common = keys.keys() & witnesses.keys()
        if common:
            self._verdicts[other] = (position.epoch, all(keys[each] == witnesses[each] for each in common))
        epoch, verdict = self._verdicts.get(other, (None, False))
        return verdict and epoch == position.epoch

    def _is_certain(self, endpoints: AbstractSet[str]) -> bool:
        hosts = {endpoint.rpartition(":")[0] for endpoint in endpoints}  # one pod may have several ports
        return self._stream.endpoint in endpoints or len(hosts) >= WITNESSES_NEEDED
