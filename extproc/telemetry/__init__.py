"""Counters and the metrics page."""
