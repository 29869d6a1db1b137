"""What the doctor says of the external-metrics API, by the status that the API server has written."""

from typing import Any

import pytest

from extproc.doctor.external_metrics_api import judge_external_metrics, look_at_external_metrics
from extproc.doctor.findings import Severity
from extproc.install.external_metrics import API_SERVICE_NAME, external_metrics_objects
from extproc.install.plan import InstallPlan


def api_service(*, ca: str | None = "UEVN", available: str | None = None) -> dict[str, Any]:
    """Return the object as it is installed, with what the API server says of it."""
    document = external_metrics_objects(InstallPlan(external_metrics=True, external_metrics_ca=ca))[-1]
    told = {"type": "Available", "status": available, "reason": "FailedDiscoveryCheck", "message": "no response"}
    return document | {"status": {"conditions": [told]} if available else {}}


@pytest.mark.parametrize(
    ("document", "severity", "seen"),
    [
        (api_service(available="True"), Severity.OK, "the API server reaches the pickers"),
        (api_service(available="False"), Severity.ERROR, "does not reach it: FailedDiscoveryCheck: no response"),
        (api_service(), Severity.ERROR, "no status: the API server has not looked yet"),
        (api_service(ca=None, available="False"), Severity.ERROR, "it has no caBundle"),
    ],
)
def test_what_the_api_server_says_is_told(document: dict[str, Any], severity: Severity, seen: str) -> None:
    [finding] = judge_external_metrics(document)
    assert finding.severity is severity
    assert finding.subject == f"APIService {API_SERVICE_NAME}"
    assert seen in finding.seen
    assert bool(finding.fix) is (severity is not Severity.OK)


def test_the_api_of_others_is_none_of_ours() -> None:
    document = api_service(available="False")
    document["metadata"] = {"name": API_SERVICE_NAME}
    assert list(judge_external_metrics(document)) == []


class Connection:
    def __init__(self, answer: dict[str, Any] | Exception) -> None:
        self._answer = answer
        self.client = self

    async def get(self, _: Any, name: str) -> dict[str, Any]:
        assert name == API_SERVICE_NAME
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer


async def test_nothing_is_said_where_it_is_not_there_or_may_not_be_read() -> None:
    assert await look_at_external_metrics(Connection(RuntimeError("404"))) == []
    [finding] = await look_at_external_metrics(Connection(api_service(available="True")))
    assert finding.severity is Severity.OK
