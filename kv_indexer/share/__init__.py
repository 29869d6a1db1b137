"""Which of several indexers follows which stream: leases in Redis."""
