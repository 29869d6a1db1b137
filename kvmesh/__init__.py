"""What the picker and the indexer both stand on: block keys, the index's schema, Redis, documents, admin access."""

from importlib.metadata import version

__version__ = version("kvmesh")
