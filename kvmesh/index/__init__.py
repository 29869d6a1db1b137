"""Reads the index: lookups in Redis, and answers from known blocks."""
