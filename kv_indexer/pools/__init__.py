"""The sources of KV events: pools, their members, the addresses of their streams."""
