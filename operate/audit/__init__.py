"""Commands on audit trails: verify and read."""
