"""The endpoints that hold a prompt's prefix: the lookup in the index, and recent routes."""
