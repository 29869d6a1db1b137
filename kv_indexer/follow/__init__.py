"""Follows one stream: live batches, gaps, replays, new epochs."""
