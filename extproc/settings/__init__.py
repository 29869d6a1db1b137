"""The picker's settings, checked once at start."""
