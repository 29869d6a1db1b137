"""Endpoints: their reports, their booked requests, and their measured speeds."""
