"""`kvmesh doctor`: gathers facts of every part, judges them, names the fix."""
