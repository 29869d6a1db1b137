"""Counters, the metrics page, and what happened in the last 15 minutes."""
