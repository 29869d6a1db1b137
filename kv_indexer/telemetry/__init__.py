"""The indexer's metrics."""
