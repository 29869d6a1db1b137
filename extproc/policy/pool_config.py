"""What the running picker needs to know of one pool: who may serve, and by which policy. A value.

It is made from documents, or from the flags (`--endpoints`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from extproc.models.models import ModelTable, ServedModel
from extproc.policy.values import PickPolicy
from kvmesh.documents.pools import PoolEndpoint

FAIL_OPEN, FAIL_CLOSE = "FailOpen", "FailClose"


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolConfig:
    """One pool as it is to be served from now on. Equal values mean that nothing has to be done."""

    name: str  # "namespace/name"; "" for the pool of flags
    from_flags: bool = False  # it serves every request, whatever its route says, and flags say what its models are
    endpoints: tuple[PoolEndpoint, ...] = ()
    policy: PickPolicy = field(default_factory=PickPolicy)
    models: ModelTable = field(default_factory=ModelTable)
    hosts: frozenset[str] = frozenset()  # lowercase, without port; no other pool has them
    endpoint_picker: str = ""  # "namespace/name" of the Service that the InferencePool names for its picker
    sample_share: float | None = None  # of the responses that are read; None: as the flag has it
    failure_mode: str = FAIL_CLOSE
    model: str | None = None  # None: learned from the pods' /v1/models
    learned: tuple[ServedModel, ...] = ()  # what they tell there, where no model is declared
    # every field that some policy gives: "spec.scoring.strategy" -> "namespace/name" of that policy
    origins: Mapping[str, str] = field(default_factory=dict)

    @property
    def learns_models(self) -> bool:
        """Whether its pods tell which models it has."""
        return self.model is None and not self.from_flags
