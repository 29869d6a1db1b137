"""Prefill apart from decode: whether it pays, which pod computes the prompt, and the request to it."""
