"""Metrics: their declarations, a registry that counts, Prometheus' text format, and the process's own figures."""
