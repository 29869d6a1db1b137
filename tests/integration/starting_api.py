"""An API server that is only starting: without its roles it refuses whatever people who are no administrators ask."""

import json

from aiohttp import web

from tests.kube_api.errors import ApiError
from tests.kube_api.faults import Faults

WORDS = 'User "picker" cannot list resource "pods": RBAC: clusterrole.rbac.authorization.k8s.io "picker" not found'


class Starting(Faults):
    """Refuses the next requests, whatever they are; also the question whether it is ready."""

    def __init__(self, *, refusals: int) -> None:
        super().__init__()
        self.refusals = refusals

    async def before(self) -> None:
        """Refuse a request, or let it pass."""
        if self.refusals > 0:
            self.refusals -= 1
            status = ApiError(403, "Forbidden", WORDS).status()
            refusal = web.HTTPForbidden(content_type="application/json")
            refusal.body = json.dumps(status).encode()
            refusal.charset = None  # Kubernetes says none
            raise refusal
        await super().before()
