"""Commands for people: `kvmesh up`, `install`, `doctor` and others. Nothing imports it."""
