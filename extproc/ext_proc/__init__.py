"""Envoy's ext_proc protocol: one stream as a state machine, its messages as bytes, and the gRPC service of it."""
