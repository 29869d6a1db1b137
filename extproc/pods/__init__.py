"""Endpoints as they are: what pods report, what is booked on them, how fast they have shown themselves to be."""
