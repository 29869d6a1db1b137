"""All of the indexer that other packages may import: block keys and the index, read.

keys    root_key, block_keys, fold_features
redis   RedisAccess (how to reach it), read_address (judges one), ping
reader  PrefixIndexReader (Redis), MemoryPrefixIndex (its in-memory twin)
values  PrefixLookup, EndpointCache, Registry, IndexStatus, SourceStatus, SourceState
errors  IndexUnavailableError; RedisUrlError (a ValueError) when the reader is made
"""

from kv_indexer.adapters.memory_index import MemoryPrefixIndex
from kv_indexer.adapters.redis_address import RedisAccess, read_address
from kv_indexer.adapters.redis_link import ping
from kv_indexer.adapters.redis_reader import PrefixIndexReader
from kv_indexer.core.block_keys import block_keys, root_key
from kv_indexer.core.extra_keys import fold_features
from kv_indexer.core.index_changes import IndexChange, Remove, Store
from kv_indexer.core.prefix_match import PrefixLookup
from kv_indexer.core.source import EndpointCache, IndexStatus, Registry, SourceState, SourceStatus, Stream
from kv_indexer.errors import IndexUnavailableError, RedisUrlError

__all__ = [
    "EndpointCache",
    "IndexChange",
    "IndexStatus",
    "IndexUnavailableError",
    "MemoryPrefixIndex",
    "PrefixIndexReader",
    "PrefixLookup",
    "RedisAccess",
    "RedisUrlError",
    "Registry",
    "Remove",
    "SourceState",
    "SourceStatus",
    "Store",
    "Stream",
    "block_keys",
    "fold_features",
    "ping",
    "read_address",
    "root_key",
]
