"""Who holds a prompt's prefix: the lookup in the index, and what was routed lately."""
