"""Carries out `kvmesh install` and `kvmesh uninstall`, with words for the person at the terminal."""

import secrets
import sys

import typer

from extproc.errors import ConfigError
from kvmesh.documents.documents import ClusterAccess
from operate.install import installer
from operate.install.lightkube_cluster import LightkubeCluster
from operate.install.mesh_facts import read_mesh
from operate.install.model_volume import judge_volume, lacks_image_volume, read_volume
from operate.install.native_pools import picker_service_name
from operate.install.objects import kind_of
from operate.install.plan import GRPC_PORT, PICKER, PICKER_ADMIN_PORT, InstallPlan, Mode, PoolTarget, Scope
from operate.install.pod_parts import ADMIN_KEY, admin_secret, admin_secret_name
from operate.install.preflight import judge
from operate.install.redis_access import USERS, users_secret
from operate.install.render import render, to_yaml
from operate.install.shipped_files import read_crds

TOKEN_BYTES = 32  # of randomness
LEFT_OUT = (
    "Not among these: the Secret kvmesh-admin-token, key token, without which nobody sees the admin pages "
    "(docs/guides/admin-access.md)"
)
USERS_LEFT_OUT = (
    "Not among these: the Secret kvmesh-redis-users, without which Redis does not start "
    "(docs/guides/redis-connection.md#the-bundled-redis)"
)
IMAGE_LEFT_OUT = (
    "warning: the API server has left the image out of the pickers' volume: it lacks the feature ImageVolume, and the "
    "pickers find no tokenizer folders. Give a claim (--tokenizers-claim), or switch the feature on"
)


def rendered(plan: InstallPlan, *, skip_crds: bool) -> list[dict[str, object]]:
    """Return the objects of the installation."""
    return render(plan, crds=[] if skip_crds else read_crds())


def print_documents(plan: InstallPlan, documents: list[dict[str, object]]) -> None:
    """Print the objects as YAML, and on standard error what they lack."""
    typer.echo(to_yaml(documents), nl=False)
    if not plan.admin_token_secret:
        typer.echo(LEFT_OUT, err=True)
    if users_secret(plan, passwords={}):
        typer.echo(USERS_LEFT_OUT, err=True)
    typer.echo(f"Tokens: {_tokens_from(plan)}", err=True)


def checked(cluster: LightkubeCluster, plan: InstallPlan, *, release_is_given: bool) -> InstallPlan:
    """Return the plan adapted to the cluster. Raise ConfigError, before anything is applied, if it cannot work."""
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


def cluster_of(context: str | None) -> LightkubeCluster:
    """Return the cluster after printing which one it is."""
    cluster = LightkubeCluster(ClusterAccess(context=context), say=typer.echo)
    typer.echo(f"cluster: {cluster.place}")
    return cluster


def install(
    cluster: LightkubeCluster,
    plan: InstallPlan,
    documents: list[dict[str, object]],
    *,
    force: bool,
    wait_seconds: float,
) -> None:
    """Apply the documents, and say what is next."""
    installer.install(
        cluster,
        documents,
        installation=plan.namespace,
        wait_seconds=wait_seconds,
        once=[
            *admin_secret(plan, token=secrets.token_urlsafe(TOKEN_BYTES)),
            *users_secret(plan, passwords={user: secrets.token_urlsafe(TOKEN_BYTES) for user in USERS}),
        ],
        namespaced=plan.scope is Scope.NAMESPACED,
        force=force,
        say=typer.echo,
    )
    if plan.tokenizers_image and lacks_image_volume(cluster.get(kind_of("Deployment"), PICKER, plan.namespace)):
        typer.echo(IMAGE_LEFT_OUT)
    typer.echo("next:")
    for target in plan.pools:
        typer.echo(f"  pool {target.identity}: {_what_next(plan, target)}")
    typer.echo(f"  tokens: {_tokens_from(plan)}")
    typer.echo(f"  admin pages: kubectl port-forward -n {plan.namespace} service/{PICKER} {PICKER_ADMIN_PORT}")
    typer.echo(f"  their token is in Secret {plan.namespace}/{admin_secret_name(plan)}, key {ADMIN_KEY}")
    typer.echo(f"  check it: kvmesh doctor --kubernetes, kvmesh policy explain {plan.pools[0].identity}")


def _tokens_from(plan: InstallPlan) -> str:
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


def _what_next(plan: InstallPlan, pool: PoolTarget) -> str:
    if plan.mode is Mode.INFERENCE_POOL:
        asked = f'{{"name": "{picker_service_name(pool)}", "port": {{"number": {GRPC_PORT}}}}}'
        return (
            f"kubectl patch inferencepool -n {pool.namespace} {pool.name} --type=merge "
            f'-p \'{{"spec": {{"endpointPickerRef": {asked}}}}}\''
        )
    return f"an InferencePool, or: kubectl label service -n {pool.namespace} {pool.name} kvmesh.io/pool=true"


def uninstall(cluster: LightkubeCluster, namespace: str, *, yes: bool, keep_crds: bool, settle_seconds: float) -> None:
    """Remove the installation of a namespace, after asking unless `yes`."""
    doomed = installer.policies(cluster) if not keep_crds and installer.is_last(cluster, namespace) else []
    if not yes:
        what = f", and these policies with their CRD: {', '.join(doomed)}" if doomed else ""
        if not sys.stdin.isatty():
            raise ConfigError(f"say --yes to remove the installation of namespace {namespace}{what}")
        typer.confirm(f"Remove the installation of namespace {namespace}{what}?", abort=True)
    count = installer.uninstall(
        cluster, installation=namespace, settle_seconds=settle_seconds, keep_crds=keep_crds, say=typer.echo
    )
    typer.echo(f"{count} objects removed")
