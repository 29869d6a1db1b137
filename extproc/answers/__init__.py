"""Responses: their usage and model name, predicted cache hits versus realised ones, and SLO targets with verdicts."""
