"""All of the indexer that other packages may import: block keys and the index, read.

keys    root_key, block_keys, fold_features, BlockExtras
redis   RedisAccess (how to reach it), read_address (judges one), ping; RedisLink, pack, PICKERS (the pickers' own keys)
reader  PrefixIndexReader (Redis), MemoryPrefixIndex (its in-memory twin)
values  PrefixLookup, EndpointCache, Registry, IndexStatus, SourceStatus, SourceState
errors  IndexUnavailableError; RedisUrlError (a ValueError) when the reader is made
"""

from kv_indexer.adapters.memory_index import MemoryPrefixIndex
from kv_indexer.adapters.redis_address import RedisAccess, read_address
from kv_indexer.adapters.redis_link import RedisLink, pack, ping
from kv_indexer.adapters.redis_reader import PrefixIndexReader
from kv_indexer.core.block_keys import BlockExtras, block_keys, root_key
from kv_indexer.core.extra_keys import fold_features
from kv_indexer.core.index_changes import IndexChange, Remove, Store
from kv_indexer.core.prefix_match import PrefixLookup
from kv_indexer.core.source import EndpointCache, IndexStatus, Registry, SourceState, SourceStatus, Stream
from kv_indexer.errors import IndexUnavailableError, RedisUrlError
from kv_indexer.wire.redis_keys import PICKERS

__all__ = [
    "PICKERS",
    "BlockExtras",
    "EndpointCache",
    "IndexChange",
    "IndexStatus",
    "IndexUnavailableError",
    "MemoryPrefixIndex",
    "PrefixIndexReader",
    "PrefixLookup",
    "RedisAccess",
    "RedisLink",
    "RedisUrlError",
    "Registry",
    "Remove",
    "SourceState",
    "SourceStatus",
    "Store",
    "Stream",
    "block_keys",
    "fold_features",
    "pack",
    "ping",
    "read_address",
    "root_key",
]
