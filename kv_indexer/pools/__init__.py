"""Whose events are to be followed: pools, their members, where each publishes."""
