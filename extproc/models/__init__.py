"""Which models are served under which names: tables, aliases, splits, fallbacks."""
