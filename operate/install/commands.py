"""The commands `kvmesh install` and `kvmesh uninstall`. Imports late, for a fast start."""

from dataclasses import replace
from typing import Annotated

import typer

from extproc.errors import ConfigError
from kvmesh.options import takes_settings
from operate.install.parse_targets import parse_clients, parse_gateway, parse_hosts, parse_pools, parse_release
from operate.install.plan import InstallPlan, MeshMembership, Mode, RedisKind, Scope

ROOT_NAMESPACE = "istio-system"
DRY_RELEASE = "1.28"  # Istio release of a dry run without --istio-version
NO_IMAGE = (
    "--image is missing: no image of kvmesh is published yet. Build one, push it to a registry that your nodes reach, "
    "and name it (docs/guides/install.md, The image)"
)
KubeContext = Annotated[str | None, typer.Option(help="Context of KUBECONFIG. Default: the current one.")]

app = typer.Typer(add_completion=False)


@app.command("install")
@takes_settings
def install(
    plan: InstallPlan,
    pool: Annotated[
        list[str],
        typer.Option(
            metavar="NAMESPACE/NAME[:PORT[:PODPORT]]",
            help="ClusterIP Service of vLLM pods and its port (8000); PODPORT if the pods' port differs. Repeat for "
            "more pools.",
        ),
    ],
    istio_version: Annotated[
        str | None,
        typer.Option(
            help="Istio release of the oldest proxy that calls the picker. Default: found in the cluster; with "
            "--dry-run 1.28."
        ),
    ] = None,
    gateway: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAMESPACE/NAME[@LABEL=VALUE,…[@SERVICEACCOUNT]]",
            help="Gateway that calls the picker; labels if no Gateway resource made it. Repeat for more.",
        ),
    ] = None,
    hostname: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HOST[:PORT][/ROUTE][=NAMESPACE/NAME]",
            help="Host of the gateway's routes, listener port (default: all), one route (Istio's name: "
            "NAMESPACE.HTTPROUTE.RULEINDEX), and pool. Repeat for more.",
        ),
    ] = None,
    clients: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAMESPACE[@LABEL=VALUE,…]",
            help="Client pods whose sidecars call the picker; default label kvmesh.io/client=true. Repeat for more.",
        ),
    ] = None,
    pool_selector: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAMESPACE/NAME=LABEL=VALUE,…",
            help="Labels of a pool's pods, for access of picker and indexer under STRICT mTLS "
            "(docs/guides/security.md).",
        ),
    ] = None,
    pools_in_mesh: Annotated[
        bool | None,
        typer.Option(
            "--pools-in-mesh/--pools-outside-mesh",
            help="Whether vLLM pods use mTLS. Default: yes, except with ambient-gateway.",
        ),
    ] = None,
    skip_crds: Annotated[bool, typer.Option(help="Do not install the CRDs.")] = False,
    preflight: Annotated[
        bool,
        typer.Option(help="First check Istio, gateways, routes, pools and the tokenizers' volume."),
    ] = True,
    dry_run: Annotated[bool, typer.Option(help="Print the objects as YAML; change nothing.")] = False,
    force_conflicts: Annotated[bool, typer.Option(help="Take over fields of other managers.")] = False,
    wait_seconds: Annotated[
        float,
        typer.Option(min=0, help="Seconds to wait for Redis, indexer and picker before gateways call it; 0: none."),
    ] = 180,
    context: KubeContext = None,
) -> None:
    """Install kvmesh into a mesh, upgrade it, or change its settings."""
    from operate.install import carry_out

    if not plan.image:
        raise ConfigError(NO_IMAGE)
    ambient = plan.mode is Mode.AMBIENT_GATEWAY
    in_mesh = not ambient if pools_in_mesh is None else pools_in_mesh
    pools = parse_pools(pool, selectors=pool_selector or (), in_mesh=in_mesh)
    plan = replace(
        plan,
        istio=parse_release(istio_version or DRY_RELEASE),
        root_namespace=plan.root_namespace or (plan.namespace if plan.scope is Scope.NAMESPACED else ROOT_NAMESPACE),
        pools=pools,
        gateways=tuple(map(parse_gateway, gateway or ())),
        routes=parse_hosts(hostname or (), pools),
        clients=tuple(map(parse_clients, clients or ())),
        membership=plan.membership or (MeshMembership.AMBIENT if ambient else MeshMembership.SIDECAR),
        redis=RedisKind.EXTERNAL if plan.redis_url else RedisKind.BUNDLED,
    )
    documents = carry_out.rendered(plan, skip_crds=skip_crds)
    if dry_run:
        carry_out.print_documents(plan, documents)
        return
    cluster = carry_out.cluster_of(context)
    if preflight:
        plan = carry_out.checked(cluster, plan, release_is_given=istio_version is not None)
        documents = carry_out.rendered(plan, skip_crds=skip_crds)
    carry_out.install(cluster, plan, documents, force=force_conflicts, wait_seconds=wait_seconds)


@app.command("uninstall")
def uninstall(
    namespace: Annotated[str, typer.Option(help="Namespace of the installation.")] = "kvmesh-system",
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    keep_crds: Annotated[
        bool, typer.Option(help="Keep the CRDs and all policies; by default the last installation removes them.")
    ] = False,
    settle_seconds: Annotated[
        float, typer.Option(min=0, help="Seconds between the removal of the gateways' filters and of the picker.")
    ] = 5,
    context: KubeContext = None,
) -> None:
    """Remove everything that `kvmesh install` created, by its labels."""
    from operate.install import carry_out

    carry_out.uninstall(
        carry_out.cluster_of(context),
        namespace,
        yes=yes,
        keep_crds=keep_crds,
        settle_seconds=settle_seconds,
    )
