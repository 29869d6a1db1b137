"""The policy of a file, in any form that `kvmesh policy check` takes, as the picker would go by it."""

from collections.abc import Mapping
from pathlib import Path

from extproc.errors import ConfigError
from extproc.models.models import ModelTable
from extproc.policy.check import check_text
from extproc.policy.inference_policy import KIND, parse_inference_policy
from extproc.policy.merged_policy import pick_policy
from extproc.policy.values import PickPolicy
from extproc.records.access_log import NameHashes
from extproc.records.audit_chain import parse_keys
from kvmesh.documents.document_files import MAX_BYTES


def read_policy(path: Path) -> tuple[PickPolicy, ModelTable]:
    """Return the one policy of a file. Raise ConfigError with its place where it is wrong, or there are several."""
    try:
        with path.open("rb") as file:
            text = file.read(MAX_BYTES + 1)  # what is longer is refused
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    found = [each for each in check_text(str(path), text) if each.is_policy]
    for each in found:
        for remark in each.remarks:
            if each.is_wrong and remark.level == "error":
                raise ConfigError(f"{path}:{remark.line}: {remark.message}")
    policies = [each.document for each in found if each.document is not None and each.document["kind"] == KIND]
    if len(policies) != 1:
        raise ConfigError(
            f"{path}: has {len(policies)} policies, and one is replayed: `kvmesh policy explain POOL --resource` "
            "merges those of a pool"
        )
    return pick_policy(parse_inference_policy(policies[0]).fields)


def tenant_names(path: Path | None, policies: list[PickPolicy]) -> Mapping[str, str]:
    """Return hash -> name of the tenants that quotas name, by the key with which the pickers have hashed names.

    `path`: the pickers' `--audit-key-file`; every key in it counts. Without it the log's tenants have no names.
    """
    if path is None:
        return {}
    try:
        keys = parse_keys(path.read_text(encoding="utf-8"), where=str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the keys of {path}: {error}") from None
    names = {quota.tenant for policy in policies for quota in policy.priorities.quotas}
    return {NameHashes(key.for_names).tenant(name): name for key in keys.values() for name in names}
