"""Checks of the part `autoscale` of the policy that concern several fields; each error names the path.

Called by `policy_document`, which has read the fields.
"""

from collections.abc import Mapping
from dataclasses import fields

from extproc.errors import ConfigError
from extproc.pods.endpoint import Role
from extproc.policy.document_fields import nearest
from extproc.policy.values import ScalePolicy

ROLES = tuple(role.value for role in Role)


def check_autoscale(autoscale: Mapping[str, ScalePolicy], *, path: str) -> None:
    """Raise ConfigError where growing and shrinking contradict, for no role that there is, or beyond its own bounds."""
    for role, scale in autoscale.items():
        where = f"{path}.{role}"
        if role not in ROLES:
            raise ConfigError(f"{where}: unknown role{nearest(role, ROLES)}")
        if scale.max_replicas is not None and scale.max_replicas < scale.min_replicas:
            raise ConfigError(f"{where}.max_replicas: must not be below min_replicas ({scale.min_replicas})")
        for signal in fields(scale.scale_up):
            up, down = getattr(scale.scale_up, signal.name), getattr(scale.scale_down, signal.name)
            if up is not None and down is not None and up <= down:
                raise ConfigError(f"{where}.scale_up.{signal.name}: must be above scale_down ({down:g}), not {up:g}")
