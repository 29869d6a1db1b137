"""The commands `kvmesh install` and `kvmesh uninstall`. They import late, to start fast."""

import secrets
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from extproc.errors import ConfigError
from extproc.install.plan import (
    GRPC_PORT,
    POD_KEY,
    REDIS_IMAGE,
    BodyMode,
    FailureMode,
    MeshMembership,
    Mode,
    PullPolicy,
    RouteSettings,
    Scope,
)

if TYPE_CHECKING:
    from extproc.install.lightkube_cluster import LightkubeCluster
    from extproc.install.plan import InstallPlan, PoolTarget

DRY_RELEASE = "1.27"  # where none is named and no cluster is looked at
DRY_RELEASE_NATIVE = "1.28"  # the first that has InferencePools as they are now
TOKEN_BYTES = 32  # of randomness
LEFT_OUT = (
    "Not among these: the Secret kvmesh-admin-token, key token, without which nobody sees the admin pages "
    "(docs/guides/admin-access.md)"
)
CERTIFICATE_LEFT_OUT = (
    "Not among these: the Secret with the certificate of the external-metrics API, and the APIService's caBundle, which"
    " is to be the Secret's ca.crt (docs/guides/autoscaling.md)"
)
IMAGE_LEFT_OUT = (
    "warning: the API server has left the image out of the pickers' volume: it lacks the feature ImageVolume, and the "
    "pickers find no tokenizer folders. Give a claim (--tokenizers-claim), or switch the feature on"
)
NO_IMAGE = (
    "--image is missing: no image of kvmesh is published yet. Build one, push it to a registry that your nodes reach, "
    "and name it (docs/guides/install.md, The image)"
)
Kubeconfig = Annotated[
    Path | None, typer.Option(help="Kubeconfig. Default: $KUBECONFIG, else ~/.kube/config, else the pod's own account.")
]
KubeContext = Annotated[str | None, typer.Option(help="Context of the kubeconfig. Default: its current one.")]

app = typer.Typer(add_completion=False)


@app.callback()
def _group() -> None:
    """Keep the commands subcommands when this app runs alone."""


@app.command("install")
def install(
    pool: Annotated[
        list[str],
        typer.Option(
            metavar="NAMESPACE/NAME[:PORT[:PODPORT]]",
            help="Service of vLLM pods, ClusterIP, and its port (8000); PODPORT where the pods' port is another one. "
            "Repeat for more pools.",
        ),
    ],
    istio_version: Annotated[
        str | None,
        typer.Option(
            help="Release of Istio, of the oldest proxies that are to ask the picker. Default: found in the cluster; "
            "with --dry-run 1.27, or 1.28 for inferencepool."
        ),
    ] = None,
    mode: Annotated[Mode, typer.Option(help="Whose Envoy asks the picker.")] = Mode.GATEWAY,
    gateway: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAMESPACE/NAME[@LABEL=VALUE,…[@SERVICEACCOUNT]]",
            help="Gateway whose pods are to ask; labels for one that no Gateway resource made. Repeat for more.",
        ),
    ] = None,
    hostname: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HOST[:PORT][/ROUTE][=NAMESPACE/NAME]",
            help="Host of the gateway's routes, the port of its listener (all), one route alone (as Istio names it: "
            "NAMESPACE.HTTPROUTE.RULEINDEX), and the pool where there are several. Repeat for more.",
        ),
    ] = None,
    clients: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAMESPACE[@LABEL=VALUE,…]",
            help="Client pods whose sidecars are to ask; default label kvmesh.io/client=true. Repeat for more.",
        ),
    ] = None,
    pool_selector: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAMESPACE/NAME=LABEL=VALUE,…",
            help="Labels of a pool's pods: lets picker and indexer reach them under STRICT mTLS "
            "(docs/guides/security.md).",
        ),
    ] = None,
    pools_in_mesh: Annotated[
        bool | None,
        typer.Option(
            "--pools-in-mesh/--pools-outside-mesh",
            help="Whether the vLLM pods speak mTLS. Default: yes, but for ambient-gateway.",
        ),
    ] = None,
    namespace: Annotated[str, typer.Option(help="Namespace of kvmesh itself.")] = "kvmesh-system",
    create_namespace: Annotated[bool, typer.Option(help="Create that namespace.")] = True,
    scope: Annotated[
        Scope, typer.Option(help="namespaced: rights in the namespaces of kvmesh and of the pools only.")
    ] = Scope.MESH,
    root_namespace: Annotated[
        str | None,
        typer.Option(help="Namespace whose policies are mesh-wide. Default: istio-system; namespaced: kvmesh's own."),
    ] = None,
    membership: Annotated[
        MeshMembership | None,
        typer.Option(help="How kvmesh's own pods are in the mesh. Default: sidecar; with ambient-gateway: ambient."),
    ] = None,
    failure_mode: Annotated[
        FailureMode, typer.Option(help="What becomes of requests while no picker answers: refused, or sent anywhere.")
    ] = FailureMode.FAIL_CLOSE,
    body_mode: Annotated[
        BodyMode | None,
        typer.Option(
            help="How bodies come to the picker. Default: duplex where the release can. With `buffered` a picker that "
            "dies cuts no answer."
        ),
    ] = None,
    route_settings: Annotated[
        RouteSettings,
        typer.Option(
            help="Timeouts and retries of the routes: kept as they are, or replaced by a timeout of the longest wait "
            "and answer and by retries of what no pod has begun. With `keep`, a request whose prompt another pod has "
            "computed is never retried."
        ),
    ] = RouteSettings.KEEP,
    redis: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Your own Redis or Valkey: redis://, rediss://, redis+sentinel://, redis+cluster://. Default: one is "
            "installed along.",
        ),
    ] = None,
    redis_username: Annotated[str | None, typer.Option(help="Redis user (ACL).")] = None,
    redis_password_secret: Annotated[
        str | None, typer.Option(help="Secret in kvmesh's namespace with the Redis password, key password.")
    ] = None,
    redis_sentinel_password_secret: Annotated[
        str | None, typer.Option(help="Secret with the Sentinels' own password, key password.")
    ] = None,
    redis_ca_secret: Annotated[
        str | None, typer.Option(help="Secret with the authority of Redis' certificate, key ca.crt.")
    ] = None,
    redis_tls_secret: Annotated[
        str | None, typer.Option(help="Secret with the certificate shown to Redis, keys tls.crt and tls.key.")
    ] = None,
    redis_image: Annotated[
        str, typer.Option(help="Image of the Redis that is installed along, better by digest: …/valkey@sha256:….")
    ] = REDIS_IMAGE,
    redis_memory_mib: Annotated[
        int, typer.Option(min=64, help="MiB of data that the Redis that is installed along may hold.")
    ] = 2048,
    redis_storage_gib: Annotated[int, typer.Option(min=1, help="GiB of its disk.")] = 8,
    image: Annotated[
        str | None, typer.Option(help="Image of kvmesh, as your nodes pull it. Required: none is published yet.")
    ] = None,
    image_pull_policy: Annotated[
        PullPolicy | None, typer.Option(help="When nodes ask the registry for it. Default: as Kubernetes has it.")
    ] = None,
    image_pull_secret: Annotated[
        list[str] | None,
        typer.Option(help="Secret in kvmesh's namespace that opens the registry. Repeat for more."),
    ] = None,
    run_as_user: Annotated[
        bool, typer.Option(help="Run as user 65532. Without: as the user that the platform picks (OpenShift).")
    ] = True,
    istio_revision: Annotated[
        str | None,
        typer.Option(help="Revision of Istio that injects kvmesh's sidecars, where the mesh has no default one."),
    ] = None,
    admin_token_secret: Annotated[
        str | None,
        typer.Option(
            help="Secret with the token of the admin pages, key token. Default: kvmesh-admin-token, made once with a "
            "random token that is never shown (docs/guides/admin-access.md)."
        ),
    ] = None,
    pod_key_secret: Annotated[
        str | None,
        typer.Option(
            help="Secret in kvmesh's namespace with the key of pods that run with --api-key; picker and indexer show "
            "it (docs/guides/security.md)."
        ),
    ] = None,
    pod_key_secret_key: Annotated[str, typer.Option(help="Key of that Secret.")] = POD_KEY,
    hash_seed: Annotated[str, typer.Option(help="Seed of the block keys.")] = "kvmesh",
    replicas: Annotated[int, typer.Option(min=1, help="Pickers, at least.")] = 2,
    max_replicas: Annotated[int, typer.Option(min=1, help="Pickers, at most; CPU decides.")] = 10,
    indexer_replicas: Annotated[int, typer.Option(min=1, help="Indexers.")] = 2,
    drain_seconds: Annotated[
        int,
        typer.Option(
            min=5, help="Seconds that a picker goes on after it was asked to stop; longer than a first token."
        ),
    ] = 60,
    longest_queue_seconds: Annotated[
        int, typer.Option(min=1, help="Seconds that a request may wait in the picker: the most patient class.")
    ] = 300,
    longest_stream_seconds: Annotated[
        int, typer.Option(min=1, help="Seconds that one answer may take, with --route-settings replace.")
    ] = 900,
    tokenizers_claim: Annotated[
        str | None, typer.Option(help="PersistentVolumeClaim with tokenizer folders; pickers see it as /models.")
    ] = None,
    tokenizers_image: Annotated[
        str | None, typer.Option(help="OCI image with tokenizer folders, as a volume (Kubernetes 1.31 or newer).")
    ] = None,
    model_cache_claim: Annotated[
        str | None,
        typer.Option(help="PersistentVolumeClaim (ReadWriteMany) that --fetch-model fills, for all pickers."),
    ] = None,
    fetch_model: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[NAME=]MODEL[@REVISION]",
            help="Model of a Hugging Face hub whose tokenizer is fetched before a picker starts, never its weights. "
            "A hub that does not answer holds up a picker for two minutes a model.",
        ),
    ] = None,
    hub_endpoint: Annotated[
        str | None, typer.Option(metavar="URL", help="Hub or mirror of --fetch-model. Default: https://huggingface.co.")
    ] = None,
    hub_token_secret: Annotated[
        str | None, typer.Option(help="Secret whose key token is the hub's token, for gated models.")
    ] = None,
    scale_deployments: Annotated[
        bool,
        typer.Option(
            "--scale-deployments",
            help="Let the picker write the scale of Deployments where a policy's autoscale says act: true.",
        ),
    ] = False,
    monitoring: Annotated[
        bool,
        typer.Option(help="Install monitors, rules, alerts and dashboards; open the metrics' ports to Prometheus."),
    ] = False,
    monitoring_namespace: Annotated[str, typer.Option(help="Namespace that Prometheus runs in.")] = "monitoring",
    external_metrics: Annotated[
        bool,
        typer.Option(
            help="Have the picker serve the Kubernetes external-metrics API, for HorizontalPodAutoscalers. A cluster "
            "has one server of it: not beside KEDA or the Prometheus adapter (docs/guides/autoscaling.md)."
        ),
    ] = False,
    external_metrics_secret: Annotated[
        str | None,
        typer.Option(
            help="Secret with the certificate of that API, keys tls.crt, tls.key and ca.crt. Default: "
            "kvmesh-external-metrics, made once with a certificate that signs itself."
        ),
    ] = None,
    skip_crds: Annotated[bool, typer.Option(help="Do not install the CRDs.")] = False,
    preflight: Annotated[
        bool,
        typer.Option(
            help="Look first at what the cluster has of Istio, gateways, routes, pools and of the tokenizers' volume."
        ),
    ] = True,
    dry_run: Annotated[bool, typer.Option(help="Print the objects as YAML and change nothing.")] = False,
    force_conflicts: Annotated[bool, typer.Option(help="Take over fields that another manager owns.")] = False,
    wait_seconds: Annotated[
        float, typer.Option(min=0, help="Seconds to wait for Redis, indexer and picker before gateways ask. 0: none.")
    ] = 180,
    kubeconfig: Kubeconfig = None,
    context: KubeContext = None,
) -> None:
    """Install kvmesh into a mesh, or upgrade it. Run again with other flags, it changes what is there."""
    from extproc.install.istio_release import parse_release
    from extproc.install.plan import InstallPlan, RedisKind, parse_clients, parse_gateway, parse_hosts, parse_pools
    from extproc.install.render import render, to_yaml
    from extproc.install.serving_certificate import with_certificate
    from extproc.install.shipped_files import read_crds

    if not image:
        raise ConfigError(NO_IMAGE)
    ambient = mode is Mode.AMBIENT_GATEWAY
    in_mesh = not ambient if pools_in_mesh is None else pools_in_mesh
    pools = parse_pools(pool, selectors=pool_selector or (), in_mesh=in_mesh)
    plan = InstallPlan(
        istio=parse_release(istio_version or (DRY_RELEASE_NATIVE if mode is Mode.INFERENCE_POOL else DRY_RELEASE)),
        mode=mode,
        namespace=namespace,
        create_namespace=create_namespace,
        scope=scope,
        root_namespace=root_namespace or (namespace if scope is Scope.NAMESPACED else "istio-system"),
        image=image,
        image_pull_policy=image_pull_policy,
        image_pull_secrets=tuple(image_pull_secret or ()),
        run_as_user=run_as_user,
        istio_revision=istio_revision,
        pools=pools,
        gateways=tuple(parse_gateway(text) for text in gateway or ()),
        routes=parse_hosts(hostname or (), pools),
        clients=tuple(parse_clients(text) for text in clients or ()),
        failure_mode=failure_mode,
        body_mode=body_mode,
        route_settings=route_settings,
        membership=membership or (MeshMembership.AMBIENT if ambient else MeshMembership.SIDECAR),
        redis=RedisKind.EXTERNAL if redis else RedisKind.BUNDLED,
        redis_url=redis,
        redis_username=redis_username,
        redis_password_secret=redis_password_secret,
        redis_sentinel_password_secret=redis_sentinel_password_secret,
        redis_ca_secret=redis_ca_secret,
        redis_tls_secret=redis_tls_secret,
        redis_image=redis_image,
        redis_memory_mib=redis_memory_mib,
        redis_storage_gib=redis_storage_gib,
        admin_token_secret=admin_token_secret,
        pod_key_secret=pod_key_secret,
        pod_key_secret_key=pod_key_secret_key,
        hash_seed=hash_seed,
        picker_replicas=replicas,
        picker_replicas_max=max_replicas,
        indexer_replicas=indexer_replicas,
        drain_seconds=drain_seconds,
        longest_queue_seconds=longest_queue_seconds,
        longest_stream_seconds=longest_stream_seconds,
        tokenizers_claim=tokenizers_claim,
        tokenizers_image=tokenizers_image,
        model_cache_claim=model_cache_claim,
        fetch_models=tuple(fetch_model or ()),
        hub_endpoint=hub_endpoint,
        hub_token_secret=hub_token_secret,
        scale_deployments=scale_deployments,
        monitoring=monitoring,
        monitoring_namespace=monitoring_namespace,
        external_metrics=external_metrics,
        external_metrics_secret=external_metrics_secret,
    )
    crds = [] if skip_crds else read_crds()
    documents = render(plan, crds=crds)
    if dry_run:
        typer.echo(to_yaml(documents), nl=False)
        if not admin_token_secret:
            typer.echo(LEFT_OUT, err=True)
        if external_metrics:
            typer.echo(CERTIFICATE_LEFT_OUT, err=True)
        typer.echo(f"Tokens: {_tokens_from(plan)}. Whether its pods tell any is asked once this is applied", err=True)
        return
    cluster = _cluster(kubeconfig, context)
    if plan.tokenizers_image:
        from extproc.install.model_volume import check_image_volumes

        check_image_volumes(cluster.minor_version())
    if preflight:
        plan = _checked(cluster, plan, release_is_given=istio_version is not None)
    plan, certificates = with_certificate(cluster, plan)
    documents = render(plan, crds=crds)
    _apply(cluster, plan, documents, certificates, force=force_conflicts, wait_seconds=wait_seconds)


def _checked(cluster: "LightkubeCluster", plan: "InstallPlan", *, release_is_given: bool) -> "InstallPlan":
    """Return the plan as it suits the cluster. Raise ConfigError, before anything is applied, where it cannot work."""
    from extproc.install.mesh_facts import read_mesh
    from extproc.install.preflight import judge
    from extproc.install.volume_checks import judge_volume, read_volume

    found = judge(plan, read_mesh(cluster, plan), release_is_given=release_is_given)
    refusals, warnings = judge_volume(plan, read_volume(cluster, plan))
    for line in found.notes:
        typer.echo(f"found: {line}")
    for line in (*found.warnings, *warnings):
        typer.echo(f"warning: {line}")
    if found.refusals or refusals:
        reasons = "\n".join(f"* {each}" for each in (*found.refusals, *refusals))
        raise ConfigError(f"nothing was applied:\n{reasons}\n(--no-preflight installs all the same)")
    return found.plan


def _cluster(kubeconfig: Path | None, context: str | None) -> "LightkubeCluster":
    """Return the cluster, once people know which one it is."""
    from extproc.install.lightkube_cluster import LightkubeCluster
    from kvmesh.documents.documents import ClusterAccess

    cluster = LightkubeCluster(ClusterAccess(kubeconfig=kubeconfig, context=context), say=typer.echo)
    typer.echo(f"cluster: {cluster.place}")
    return cluster


def _apply(
    cluster: "LightkubeCluster",
    plan: "InstallPlan",
    documents: list[dict[str, object]],
    certificates: list[dict[str, object]],
    *,
    force: bool,
    wait_seconds: float,
) -> None:
    from extproc.install.installer import install as apply
    from extproc.install.model_volume import lacks_image_volume
    from extproc.install.objects import kind_of
    from extproc.install.plan import PICKER
    from extproc.install.pod_parts import admin_secret
    from extproc.install.token_question import token_lines

    apply(
        cluster,
        documents,
        installation=plan.namespace,
        wait_seconds=wait_seconds,
        once=[*admin_secret(plan, token=secrets.token_urlsafe(TOKEN_BYTES)), *certificates],
        namespaced=plan.scope is Scope.NAMESPACED,
        force=force,
        say=typer.echo,
    )
    if plan.tokenizers_image and lacks_image_volume(cluster.get(kind_of("Deployment"), PICKER, plan.namespace)):
        typer.echo(IMAGE_LEFT_OUT)
    _say_what_is_next(plan, typer.echo)
    for line in token_lines(cluster, plan):
        typer.echo(line)


def _say_what_is_next(plan: "InstallPlan", say: Callable[[str], None]) -> None:
    from extproc.install.plan import PICKER, PICKER_ADMIN_PORT
    from extproc.install.pod_parts import ADMIN_KEY, admin_secret_name

    say("next:")
    for target in plan.pools:
        say(f"  pool {target.identity}: {_what_next(plan, target)}")
    say(f"  tokens: {_tokens_from(plan)}")
    say(f"  admin pages: kubectl port-forward -n {plan.namespace} service/{PICKER} {PICKER_ADMIN_PORT}")
    say(f"  their token is in Secret {plan.namespace}/{admin_secret_name(plan)}, key {ADMIN_KEY}")
    say(f"  check it: kvmesh policy explain {plan.pools[0].identity}, and docs/guides/install.md")


def _tokens_from(plan: "InstallPlan") -> str:
    asked = "the pods are asked for each prompt (/render with --enable-scale-out, else /tokenize)"
    folders = plan.tokenizers_claim or plan.model_cache_claim
    if plan.tokenizers_image:
        return f"of models with a folder in image {plan.tokenizers_image}, from there; of others, {asked}"
    if plan.fetch_models:
        into = f"into claim {folders}" if folders else "by each picker's pod"
        return f"of {', '.join(plan.fetch_models)}, fetched {into} before it starts; of others, {asked}"
    if folders:
        return f"of models with a folder in claim {folders}, from there; of others, {asked}"
    return f"{asked}; folders (--tokenizers-claim, --fetch-model) cost less time"


def _what_next(plan: "InstallPlan", pool: "PoolTarget") -> str:
    from extproc.install.native_pools import picker_service_name

    if plan.mode is Mode.INFERENCE_POOL:
        asked = f'{{"name": "{picker_service_name(pool)}", "port": {{"number": {GRPC_PORT}}}}}'
        return (
            f"kubectl patch inferencepool -n {pool.namespace} {pool.name} --type=merge "
            f'-p \'{{"spec": {{"endpointPickerRef": {asked}}}}}\''
        )
    return f"an InferencePool, or: kubectl label service -n {pool.namespace} {pool.name} kvmesh.io/pool=true"


@app.command("uninstall")
def uninstall(
    namespace: Annotated[str, typer.Option(help="Namespace of the installation.")] = "kvmesh-system",
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    keep_crds: Annotated[
        bool, typer.Option(help="Keep the CRDs, and with them all policies. Else they go with the last installation.")
    ] = False,
    settle_seconds: Annotated[
        float, typer.Option(min=0, help="Seconds for gateways to forget the picker before it goes.")
    ] = 5,
    kubeconfig: Kubeconfig = None,
    context: KubeContext = None,
) -> None:
    """Remove everything that `kvmesh install` made, by its labels."""
    from extproc.install import installer

    cluster = _cluster(kubeconfig, context)
    doomed = installer.policies(cluster) if not keep_crds and installer.is_last(cluster, namespace) else []
    if not yes:
        what = f", and these policies with their CRD: {', '.join(doomed)}" if doomed else ""
        if not sys.stdin.isatty():
            raise ConfigError(f"say --yes to remove the installation of namespace {namespace}{what}")
        typer.confirm(f"Remove the installation of namespace {namespace}{what}?", abort=True)
    count = installer.uninstall(
        cluster,
        installation=namespace,
        settle_seconds=settle_seconds,
        keep_crds=keep_crds,
        say=typer.echo,
    )
    typer.echo(f"{count} objects removed")
