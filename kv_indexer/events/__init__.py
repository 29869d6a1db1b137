"""A pod's stream of KV events: sockets, frames, decoding, the rules of its sequence."""
