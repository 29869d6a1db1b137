"""Looks at the index by hand: `kvmesh index sources`, `verify`, `size`, `clear`."""
