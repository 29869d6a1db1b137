"""GETs and reads a pod's pages."""
