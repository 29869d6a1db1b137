"""Whose turn it is: requests counted by model, for round robin. Bounded, since any client may name a model."""


class RoundRobin:
    """The requests of each model; where there are too many models, the one not asked for longest begins anew."""

    def __init__(self, *, most_models: int = 1024) -> None:
        self._most_models = most_models
        self._counts: dict[str | None, int] = {}

    def __call__(self, model: str | None) -> int:
        """Return how many requests of this model there were before."""
        count = self._counts.pop(model, 0)
        self._counts[model] = count + 1  # the latest goes last
        if len(self._counts) > self._most_models:
            del self._counts[next(iter(self._counts))]
        return count
