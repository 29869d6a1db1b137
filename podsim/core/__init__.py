"""What a simulated engine decides: block hashes, the block pool, the scheduler, the generated tokens. No I/O."""
