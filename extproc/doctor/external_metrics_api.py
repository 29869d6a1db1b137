"""Whether the API server reaches the external-metrics API of an installation: it says so in the APIService's status."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from extproc.doctor.findings import Finding, error, fine
from extproc.install.external_metrics import API_SERVICE_NAME
from extproc.install.objects import API_SERVICE, OWNED
from extproc.install.plan import EXTERNAL_METRICS_PORT
from kvmesh.documents.document_kinds import DocumentKind
from kvmesh.documents.documents import Document

SUBJECT = f"{API_SERVICE.name} {API_SERVICE_NAME}"
KIND = DocumentKind(
    group=API_SERVICE.group, version=API_SERVICE.version, kind=API_SERVICE.name, plural=API_SERVICE.plural, keep=dict
)


async def look_at_external_metrics(connection: Any) -> list[Finding]:
    """Return what is found; nothing where there is no such API of ours, or it may not be read."""
    from kvmesh.documents.kubernetes_client import global_class  # noqa: PLC0415 # 0.1 s and 20 MB

    with suppress(Exception):  # an API of other people: what it raises says that nothing of ours is to be seen
        return list(judge_external_metrics(await connection.client.get(global_class(KIND), API_SERVICE_NAME)))
    return []


def judge_external_metrics(document: Document) -> Iterator[Finding]:
    """Say whether an APIService of ours can be asked."""
    labels = document["metadata"].get("labels") or {}
    if not OWNED.items() <= labels.items():
        return
    if not document["spec"].get("caBundle"):
        fix = "run `kvmesh install --external-metrics` again: it takes the certificate's authority from the Secret"
        yield error(SUBJECT, "it has no caBundle, so that the API server trusts no picker", fix=fix)
        return
    conditions = (document.get("status") or {}).get("conditions") or ()
    available: Mapping[str, Any] = next((each for each in conditions if each.get("type") == "Available"), {})
    if available.get("status") == "True":
        yield fine(SUBJECT, "the API server reaches the pickers")
        return
    said = f"{available.get('reason', 'no status')}: {available.get('message', 'the API server has not looked yet')}"
    fix = (
        f"see the picker's log and kvmesh_external_metrics_served, and let the API server reach port "
        f"{EXTERNAL_METRICS_PORT} of the pickers; until then autoscalers get no number and no namespace can be removed"
    )
    yield error(SUBJECT, f"the API server does not reach it: {said}", fix=fix)
