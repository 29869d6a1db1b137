"""The in-memory index can play an indexer that is gone."""

from kvmesh.blocks.block_keys import root_key
from kvmesh.blocks.source import IndexStatus, Stream
from tests.unit.kvmesh_index.kv_memory_index import MemoryPrefixIndex

POD = Stream(endpoint="10.0.0.1:8000")


async def test_a_test_decides_whether_the_indexer_of_the_twin_is_alive() -> None:
    index = MemoryPrefixIndex(indexer_alive=False)
    await index.claim(POD)
    root = root_key(hash_seed="kvmesh", model="tiny")
    dead = await index.lookup(b"", root=root)
    index.indexer_alive = True

    assert (dead.indexer_alive, (await index.lookup(b"", root=root)).indexer_alive) == (False, True)
    assert await index.status() == IndexStatus(sources=tuple(await index.sources()), indexer_alive=True, unreadable=())
