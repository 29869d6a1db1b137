"""All of the indexer that other packages may import: block keys and the index, read.

keys    root_key, block_keys, fold_features, BlockExtras
redis   RedisAccess (how to reach it), read_address (judges one), ping; RedisLink, pack, PICKERS (the pickers' own keys)
reader  PrefixIndexReader (Redis), MemoryPrefixIndex (its in-memory twin); IndexView (pages' look at it)
values  PrefixLookup, EndpointCache, Registry, IndexStatus, SourceStatus, SourceState
pools   Pool, PoolEndpoint, resolve_pools, PoolResolver, pool_seed, static_pool: who may serve what
cluster Snapshot, Document, DocumentSource, DocumentProblem: what Kubernetes (or a folder of documents) says;
        kubernetes_source, folder_source, status_writer and their values; read_documents (of a file)
admin   AdminAccess (who may see the admin pages), AdminGate (stands before them), server_options (of a server that it
        guards), BY_TOKEN, refusal_json (an error's form); AdminLogin (what a client shows)
pods    PodHttp (GETs a pod's pages over a kept connection), HttpResponse
errors  SettingError; IndexUnavailableError; RedisUrlError (a ValueError) when the reader is made
"""

from kv_indexer.adapters.admin_gate import BY_TOKEN, AdminGate, refusal_json, server_options
from kv_indexer.adapters.admin_login import AdminLogin
from kv_indexer.adapters.cluster_sources import folder_source, kubernetes_source, status_writer
from kv_indexer.adapters.index_view import IndexLook, IndexView
from kv_indexer.adapters.memory_index import MemoryPrefixIndex
from kv_indexer.adapters.pod_http import PodHttp
from kv_indexer.adapters.redis_address import RedisAccess, read_address
from kv_indexer.adapters.redis_link import RedisLink, pack, ping
from kv_indexer.adapters.redis_reader import PrefixIndexReader
from kv_indexer.core.admin_access import AdminAccess
from kv_indexer.core.block_keys import BlockExtras, block_keys, root_key
from kv_indexer.core.cluster_access import ClusterAccess, KubernetesConfigError
from kv_indexer.core.document_kinds import MESH_KINDS, POOL_KINDS, DocumentKind
from kv_indexer.core.documents import Document, DocumentKey, DocumentProblem, DocumentSource, Snapshot, document_key
from kv_indexer.core.extra_keys import fold_features
from kv_indexer.core.index_changes import IndexChange, Remove, Store
from kv_indexer.core.pool_resolver import PoolResolver, resolve_pools
from kv_indexer.core.pools import EventTemplates, Pool, PoolEndpoint, ResolvedPools, pool_seed, static_pool
from kv_indexer.core.prefix_match import PrefixLookup
from kv_indexer.core.served_models import first_base_model
from kv_indexer.core.source import EndpointCache, IndexStatus, Registry, SourceState, SourceStatus, Stream
from kv_indexer.core.status_update import StatusUpdate
from kv_indexer.errors import IndexUnavailableError, RedisUrlError, SettingError
from kv_indexer.wire.document_files import DocumentFileError, read_documents
from kv_indexer.wire.http_response import HttpResponse
from kv_indexer.wire.redis_keys import PICKERS

__all__ = [
    "BY_TOKEN",
    "MESH_KINDS",
    "PICKERS",
    "POOL_KINDS",
    "AdminAccess",
    "AdminGate",
    "AdminLogin",
    "BlockExtras",
    "ClusterAccess",
    "Document",
    "DocumentFileError",
    "DocumentKey",
    "DocumentKind",
    "DocumentProblem",
    "DocumentSource",
    "EndpointCache",
    "EventTemplates",
    "HttpResponse",
    "IndexChange",
    "IndexLook",
    "IndexStatus",
    "IndexUnavailableError",
    "IndexView",
    "KubernetesConfigError",
    "MemoryPrefixIndex",
    "PodHttp",
    "Pool",
    "PoolEndpoint",
    "PoolResolver",
    "PrefixIndexReader",
    "PrefixLookup",
    "RedisAccess",
    "RedisLink",
    "RedisUrlError",
    "Registry",
    "Remove",
    "ResolvedPools",
    "SettingError",
    "Snapshot",
    "SourceState",
    "SourceStatus",
    "StatusUpdate",
    "Store",
    "Stream",
    "block_keys",
    "document_key",
    "first_base_model",
    "fold_features",
    "folder_source",
    "kubernetes_source",
    "pack",
    "ping",
    "pool_seed",
    "read_address",
    "read_documents",
    "refusal_json",
    "resolve_pools",
    "root_key",
    "server_options",
    "static_pool",
    "status_writer",
]
