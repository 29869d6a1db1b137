"""What the picker and the indexer share: block keys, the index's schema, Redis, documents, admin access."""

from importlib.metadata import version

__version__ = version("kvmesh")
