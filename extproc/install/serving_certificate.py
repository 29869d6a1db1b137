"""The certificate of the external-metrics port: that of the Secret that is there, or one that is made once.

It signs itself, and the APIService trusts it alone: nobody has to keep an authority's key.
"""

from dataclasses import replace

from extproc.errors import ConfigError
from extproc.install.cluster import Cluster, InstallError
from extproc.install.external_metrics import AUTHORITY, NAME, secret_name, server_names, serving_secret
from extproc.install.objects import SECRET, Document
from extproc.install.plan import InstallPlan
from kvmesh.errors import SettingError
from kvmesh.self_signed import make_self_signed


def with_certificate(cluster: Cluster, plan: InstallPlan) -> tuple[InstallPlan, list[Document]]:
    """Return the plan with whom the API server is to trust, and the Secret to make where there is none.

    Raise ConfigError or InstallError where there can be none.
    """
    if not plan.external_metrics:
        return plan, []
    name = secret_name(plan)
    found = cluster.get(SECRET, name, plan.namespace)
    if found is not None:
        authority = (found.get("data") or {}).get(AUTHORITY)
        if not authority:
            raise InstallError(
                f"Secret {plan.namespace}/{name} has no {AUTHORITY}: whom the API server is to trust with "
                f"{server_names(plan)[0]}. Nothing was changed"
            )
        return replace(plan, external_metrics_ca=authority), []
    if plan.external_metrics_secret:
        raise InstallError(
            f"--external-metrics-secret: there is no Secret {plan.namespace}/{name}; make it first, with tls.crt (for "
            f"{server_names(plan)[0]}), tls.key and {AUTHORITY}. Nothing was changed"
        )
    try:
        names = server_names(plan)
        made = make_self_signed(NAME, names=names, flag="--external-metrics", instead="--external-metrics-secret")
    except SettingError as error:
        raise ConfigError(str(error)) from None
    secret = serving_secret(plan, cert=made.cert, key=made.key)
    return replace(plan, external_metrics_ca=secret["data"][AUTHORITY]), [secret]
