"""Block keys, and the values of the index: streams, sources, groups, tiers, changes."""
