"""The Helm chart `charts/kvmesh`, made from the same renderer as `kvmesh install`; a test compares them.

`python -m tools.helm_chart charts/kvmesh` writes what is made: the templates of the objects, the values and their
schema. `_plan.tpl`, `checks.yaml`, `admin-token.yaml` and NOTES.txt of `templates/` are
written by hand.

The renderer renders many plans, drawn by a fixed seed, in which words like `zqhashseedqz` stand for the values. What
differs between the renderings depends on conditions on the values (`tools.chart_tree`).
"""

import json
import random
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from extproc.errors import ConfigError
from operate.install.objects import NAME, Document
from operate.install.parse_targets import OLDEST_MINOR, SELECTED_HOST_KEY_FROM, planned_body_mode
from operate.install.plan import (
    BodyMode,
    ClientsTarget,
    FailureMode,
    GatewayTarget,
    InstallPlan,
    IstioVersion,
    MeshMembership,
    Mode,
    PoolTarget,
    RedisKind,
    RouteSettings,
    RouteTarget,
    Scope,
)
from operate.install.pod_parts import redis_address
from operate.install.render import DASHBOARD_FILES, render, to_yaml
from operate.install.shipped_files import CRDS, read_crds
from operate.install.workloads import HEADROOM
from tools.chart_tree import Node, Sample, Words, Writer, items
from tools.chart_values import schema, values

HEADER = "{{- /* Made by `python -m tools.helm_chart charts/kvmesh`: change operate/install, not this. */ -}}\n"
PRELUDE = '{{- $plan := include "kvmesh.plan" $ | fromYaml }}\n'
SAMPLES = 600
OFTEN = 0.5
SEED = 19
# words that stand for values: what `zqKEYqz` is in a template
EXPRESSIONS = {
    "namespace": "$.Release.Namespace",
    "rootnamespace": "$plan.rootNamespace",
    "image": "$.Values.image",
    "redisimage": "$.Values.redisImage",
    "pullpolicy": "$.Values.imagePullPolicy",
    "pullsecret": "$secret",
    "revision": "$.Values.istioRevision",
    "poolnamespace": "$pool.namespace",
    "poolname": "$pool.name",
    "poolselector": "$pool.selector",
    "routehost": "$route.host",
    "routeroute": "$route.route",
    "gatewaynamespace": "$gateway.namespace",
    "gatewayname": "$gateway.name",
    "gatewayselector": "$gateway.selector",
    "gatewayaccount": "$gateway.serviceAccount",
    "clientsnamespace": "$clients.namespace",
    "clientsselector": "$clients.selector",
    "redisaddress": "$plan.redisAddress",
    "redispassword": "$.Values.redisPasswordSecret",
    "redissentinel": "$.Values.redisSentinelPasswordSecret",
    "redisca": "$.Values.redisCaSecret",
    "redistls": "$.Values.redisTlsSecret",
    "admintoken": "$.Values.adminTokenSecret",
    "podkey": "$.Values.podKeySecret",
    "podkeyname": "$.Values.podKeySecretKey",
    "hashseed": "$.Values.hashSeed",
    "tokenizers": "$.Values.tokenizersClaim",
    "modelcache": "$.Values.modelCacheClaim",
    "tokenizersimage": "$.Values.tokenizersImage",
    "fetchmodel": '(join "," $.Values.fetchModels)',
    "hubendpoint": "$.Values.hubEndpoint",
    "hubtoken": "$.Values.hubTokenSecret",
    "monitoringnamespace": "$.Values.monitoringNamespace",
}
PLAIN = re.compile(r"[A-Za-z/][-\w./@%+]*")  # needs no quotes in YAML
WORD = re.compile(r"zq([a-z]+)qz")
# numbers that stand for values; several in one figure are added up, as in the objects
NUMBERS = {
    "redis_memory_mib": (7_010_000, "$.Values.redisMemoryMib"),
    "redis_storage_gib": (7_020_000, "$.Values.redisStorageGib"),
    "picker_replicas": (7_030_000, "$.Values.replicas"),
    "picker_replicas_max": (7_040_000, "$.Values.maxReplicas"),
    "indexer_replicas": (7_050_000, "$.Values.indexerReplicas"),
    "drain_seconds": (7_100_000, "$.Values.drainSeconds"),
    "longest_queue_seconds": (7_200_000, "$.Values.longestQueueSeconds"),
    "longest_stream_seconds": (9_100_000, "$.Values.longestStreamSeconds"),
}
POOL_PORT, POD_PORT, ROUTE_PORT = 7_300_000, 7_310_000, 7_320_000
FIGURES = {
    **{number: f"(int {expression})" for number, expression in NUMBERS.values()},
    POOL_PORT: "(int $pool.port)",
    POD_PORT: "(int $pool.podPort)",
    ROUTE_PORT: "(int $route.port)",
    NUMBERS["longest_queue_seconds"][0] + NUMBERS["longest_stream_seconds"][0]: (
        "(add $.Values.longestQueueSeconds $.Values.longestStreamSeconds)"
    ),
    round(NUMBERS["redis_memory_mib"][0] * HEADROOM): (
        f"(div (add (mul $.Values.redisMemoryMib {round(HEADROOM * 10)}) 5) 10)"
    ),
}
# a few seconds more: the time to drain and to settle, the longest wait and a minute
ADDED = {NUMBERS[name][0]: NUMBERS[name][1] for name in ("drain_seconds", "longest_queue_seconds")}
LARGEST_ADDED = 999
FIGURE = re.compile(r"\d{7,8}")
# what is made of several values at once
PHRASES = {
    "zqnamespaceqz,zqpoolnamespaceqz": '(join "," $plan.watchedNamespaces)',
    "kvmesh-zqpoolnameqz-pods": "$pool.podsName",
    "kvmesh-picker-zqpoolnameqz": "$pool.pickerName",
    "https://zqhubendpointqz": "$.Values.hubEndpoint",  # the plan wants a scheme
}
LOOPS = {
    "$route": "$route := $plan.routes }}{{- $pool := $route.pool",  # a route names its pool
    "$pool": "$pool := $plan.pools",
    "$gateway": "$gateway := $plan.gateways",
    "$clients": "$clients := $plan.clients",
    "$secret": "$secret := $.Values.imagePullSecrets",
}
# each value once, in order: of what names nothing else of its pool, gateway or clients
DISTINCT = {
    "$pool.namespace": "$pool := $plan.poolNamespaces",
    "$pool.port": "$pool := $plan.poolPorts",
    "$gateway.namespace": "$gateway := $plan.gatewayNamespaces",
    "$clients.namespace": "$clients := $plan.clientsNamespaces",
}
GATES = (SELECTED_HOST_KEY_FROM,)
OPTIONAL = {
    "redis_password_secret": "redispassword",
    "redis_sentinel_password_secret": "redissentinel",
    "redis_ca_secret": "redisca",
    "redis_tls_secret": "redistls",
    "admin_token_secret": "admintoken",
    "pod_key_secret": "podkey",
    "tokenizers_claim": "tokenizers",
    "istio_revision": "revision",
    "image_pull_policy": "pullpolicy",
}
FOLDERS = {
    "model_cache_claim": "modelcache",
    "tokenizers_image": "tokenizersimage",
    "hub_endpoint": "hubendpoint",
    "hub_token_secret": "hubtoken",
}


def chart_files() -> dict[str, str]:
    """Return the made files of the chart, by their paths in it."""
    samples = list(_samples())
    files: dict[str, str] = {}
    for component in dict.fromkeys(_file_of(each) for sample in samples for each in sample.value):
        own = [Sample(each.holds, [one for one in each.value if _file_of(one) == component]) for each in samples]
        writer = Writer(scalar=_scalar, whole=_whole)
        writer.documents(items(own, WORDS))
        files[f"templates/{component}.yaml"] = HEADER + PRELUDE + "\n".join(writer.lines) + "\n"
    crds = render(draw_plan(_chance(), sure=True)[0], crds=read_crds())[: len(CRDS)]
    files["crds/kvmesh.yaml"] = to_yaml(crds)
    return files | {"values.yaml": values(), "values.schema.json": json.dumps(schema(), indent=2) + "\n"}


def _file_of(document: Document) -> str:
    labels: Mapping[str, str] = document["metadata"]["labels"]
    if document["kind"] == "EnvoyFilter":
        return "envoy-filters"
    return labels.get(NAME, "pools").removeprefix("kvmesh-")


def _chance() -> random.Random:
    return random.Random(SEED)  # noqa: S311 - the same plans each time


def _samples() -> Iterator[Sample]:
    chance = _chance()
    count = 0
    while count < SAMPLES:
        plan, holds = draw_plan(chance)
        try:
            documents = render(plan)
        except ConfigError:
            continue
        count += 1
        yield Sample(frozenset(holds), [_with_address(_with_files(each), redis_address(plan)) for each in documents])


def draw_plan(chance: random.Random, *, sure: bool = False) -> tuple[InstallPlan, set[str]]:
    """Draw a plan, and return what holds in it."""

    def maybe() -> bool:
        return not sure and chance.random() < OFTEN

    mode = Mode.GATEWAY if sure else chance.choice(list(Mode))
    native = mode is Mode.INFERENCE_POOL
    pool = PoolTarget(
        namespace="zqnamespaceqz" if native else "zqpoolnamespaceqz",
        name="zqpoolnameqz",
        port=POOL_PORT,
        pod_port=POD_PORT,
        selector={"zqpoolselectorqz": ""} if maybe() else None,
        in_mesh=maybe(),
        has_rule=maybe(),
    )
    route = RouteTarget(
        host="zqroutehostqz",
        port=ROUTE_PORT if maybe() else None,
        route="zqrouterouteqz" if maybe() else None,
        pool=pool,
    )
    gateway = GatewayTarget(
        namespace="zqgatewaynamespaceqz",
        name="zqgatewaynameqz",
        selector={"zqgatewayselectorqz": ""},
        service_account="zqgatewayaccountqz",
    )
    clients = ClientsTarget(namespace="zqclientsnamespaceqz", selector={"zqclientsselectorqz": ""})
    sidecar = mode is Mode.SIDECAR
    scope = Scope.NAMESPACED if maybe() else Scope.MESH
    external = maybe()
    plan = InstallPlan(
        istio=IstioVersion(minor=chance.choice([OLDEST_MINOR, *GATES])),
        mode=mode,
        namespace="zqnamespaceqz",
        create_namespace=False,
        scope=scope,
        root_namespace="zqnamespaceqz" if scope is Scope.NAMESPACED else "zqrootnamespaceqz",
        image="zqimageqz",
        redis_image="zqredisimageqz",
        image_pull_secrets=("zqpullsecretqz",) if maybe() else (),
        run_as_user=maybe(),
        pools=(pool,),
        routes=() if sidecar or native else (route,),
        gateways=() if sidecar else (gateway,),
        clients=(clients,) if sidecar else (),
        failure_mode=FailureMode.FAIL_OPEN if maybe() and not native else FailureMode.FAIL_CLOSE,
        body_mode=None if sure or native else chance.choice([None, *BodyMode]),
        route_settings=RouteSettings.REPLACE if maybe() else RouteSettings.KEEP,
        membership=MeshMembership.SIDECAR if sure else chance.choice(list(MeshMembership)),
        redis=RedisKind.EXTERNAL if external else RedisKind.BUNDLED,
        redis_url="redis://zqredisqz" if external else None,
        hash_seed="zqhashseedqz",
        pod_key_secret_key="zqpodkeynameqz",  # noqa: S106 - a word that stands for a name
        monitoring=maybe(),
        monitoring_namespace="zqmonitoringnamespaceqz",
        **{name: number for name, (number, _) in NUMBERS.items()},  # type: ignore[arg-type]
    )
    given = {name: f"zq{word}qz" for name, word in OPTIONAL.items() if maybe() and _may_be(name, plan)}
    plan = replace(plan, **given)  # type: ignore[arg-type]
    plan = plan if sure else _with_folders(plan)
    facts = _facts(plan)
    return plan, {condition for condition, holds in facts.items() if holds}


def _may_be(name: str, plan: InstallPlan) -> bool:
    if name.startswith("redis_") and name != "redis_password_secret":
        return plan.redis is RedisKind.EXTERNAL
    return name != "istio_revision" or plan.membership is MeshMembership.SIDECAR


def _with_folders(plan: InstallPlan) -> InstallPlan:
    """Draw where tokenizer folders come from, where no claim has them."""
    if plan.tokenizers_claim:
        return plan
    chance = random.Random(repr(plan))  # noqa: S311 - the same each time, and no other draw depends on it
    kind = chance.choice(["none", "image", "claim", "fetched", "fetched into a claim"])
    if kind == "image":
        return replace(plan, tokenizers_image="zqtokenizersimageqz")
    claim = "zqmodelcacheqz" if "claim" in kind else None
    if not kind.startswith("fetched"):
        return replace(plan, model_cache_claim=claim)
    return replace(
        plan,
        model_cache_claim=claim,
        fetch_models=("zqfetchmodelqz",),
        hub_endpoint=chance.choice([None, "https://zqhubendpointqz"]),
        hub_token_secret=chance.choice([None, "zqhubtokenqz"]),
    )


def _facts(plan: InstallPlan) -> dict[str, bool]:
    """Return each condition that templates may ask for, and whether it holds."""
    pool = plan.pools[0]
    route = plan.routes[0] if plan.routes else None
    return {
        'eq $.Values.mode "sidecar"': plan.mode is Mode.SIDECAR,
        'eq $.Values.mode "ambient-gateway"': plan.mode is Mode.AMBIENT_GATEWAY,
        'eq $.Values.mode "inferencepool"': plan.mode is Mode.INFERENCE_POOL,
        'eq $plan.membership "sidecar"': plan.membership is MeshMembership.SIDECAR,
        'eq $plan.membership "ambient"': plan.membership is MeshMembership.AMBIENT,
        'eq $.Values.scope "namespaced"': plan.scope is Scope.NAMESPACED,
        "$.Values.redis": plan.redis is RedisKind.EXTERNAL,
        "$.Values.monitoring": plan.monitoring,
        **{f"ge (int $plan.minor) {gate}": plan.istio.minor >= gate for gate in GATES},
        "$plan.buffered": planned_body_mode(plan) is BodyMode.BUFFERED,
        'eq $.Values.failureMode "FailOpen"': plan.failure_mode is FailureMode.FAIL_OPEN,
        'eq $.Values.routeSettings "replace"': plan.route_settings is RouteSettings.REPLACE,
        "$plan.poolsInMesh": pool.in_mesh,
        "$.Values.runAsUser": plan.run_as_user,
        "$.Values.imagePullSecrets": bool(plan.image_pull_secrets),
        "$.Values.fetchModels": bool(plan.fetch_models),
        **{EXPRESSIONS[word]: getattr(plan, name) is not None for name, word in (OPTIONAL | FOLDERS).items()},
        "$pool.selector": pool.selector is not None,
        "$pool.hasRule": pool.has_rule,
        "$route.route": route is not None and route.route is not None,
        "$route.port": route is not None and route.port is not None,
    }


def _with_files(document: Document) -> Document:
    """Leave rules and dashboards to the files that the chart holds."""
    if document["kind"] == "PrometheusRule":
        return document | {"spec": {"(.Files.Get)": ""}}
    if document["metadata"]["labels"].get(NAME) == DASHBOARD_FILES:
        return document | {"data": {name: f"(.Files.Get) {name}" for name in document["data"]}}
    return document


def _with_address(document: Document, address: str) -> Document:
    """Leave Redis' URL with the paths of the mounted Secrets to `_plan.tpl`."""
    replaced: Document = json.loads(json.dumps(document).replace(json.dumps(address), '"zqredisaddressqz"'))
    return replaced


def _expressions(part: Any) -> frozenset[str]:
    text = json.dumps(part)
    for phrase in PHRASES:
        if phrase.startswith("zqnamespace"):
            text = text.replace(phrase, "")
    words = {EXPRESSIONS[word] for word in WORD.findall(text)}
    figures = {FIGURES[int(figure)] for figure in FIGURE.findall(text) if int(figure) in FIGURES}
    return frozenset(words | {each.removeprefix("(int ").removesuffix(")") for each in figures})


def _variables(part: Any) -> frozenset[str]:
    return frozenset(each.partition(".")[0] for each in _expressions(part)) & LOOPS.keys()


def _loop_of(part: Any, inside: frozenset[str]) -> str | None:
    if isinstance(part, dict) and not NOT_REPEATED.isdisjoint(part):
        return None
    # an object repeats with what it is named after
    named = part["metadata"] if isinstance(part, dict) and "kind" in part and "metadata" in part else part
    free = _variables(named) - inside
    names = _expressions(part)
    variable = next((each for each in LOOPS if each in free), None)
    if variable is None:
        return None
    of_it = [each for each in names if each.partition(".")[0] == variable]
    return DISTINCT.get(of_it[0], LOOPS[variable]) if len(of_it) == 1 else LOOPS[variable]


def _bound(loop: str) -> frozenset[str]:
    return frozenset(re.findall(r"(\$\w+) :=", loop))


def _whole(nodes: Mapping[str, Node]) -> str | None:
    """Return the value that stands for all fields of an object: labels, or a file."""
    if len(nodes) != 1:
        return None
    (name,) = nodes
    if name == "(.Files.Get)":
        return '($.Files.Get "monitoring/prometheus/kvmesh.rules.yaml" | fromYaml)'
    match = WORD.fullmatch(name)
    return EXPRESSIONS[match[1]] if match else None


NOT_REPEATED = frozenset({"from", "source"})  # one rule for all callers: what repeats is further in


def _scalar(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return _figure(value) if value > 7_000_000 and _number(value) else str(value)
    if not isinstance(value, str):
        return json.dumps(value)
    if value.startswith("(.Files.Get)"):
        path = f"monitoring/grafana/dashboards/{value.split()[1]}"
        return f'{{{{ $.Files.Get "{path}" | fromJson | toJson | quote }}}}'
    pattern = "|".join([*map(re.escape, PHRASES), WORD.pattern, FIGURE.pattern])
    found = [(match[0], _expression(match[0])) for match in re.finditer(pattern, value)]
    known = [(text, expression) for text, expression in found if expression]
    if not known:
        plain = PLAIN.fullmatch(value) and isinstance(yaml.safe_load(value), str)
        return value if plain else json.dumps(value, ensure_ascii=False).replace("{{", '{{ "{{" }}')
    if len(known) == 1 and known[0][0] == value and not value.isdigit():
        return f"{{{{ {known[0][1]} | quote }}}}"
    form = value.replace("%", "%%")
    for text, expression in known:
        form = form.replace(text, "%d" if text.isdigit() and "join" not in expression else "%s", 1)
    return f"{{{{ printf {json.dumps(form)} {' '.join(each for _, each in known)} | quote }}}}"


def _expression(text: str) -> str | None:
    if text in PHRASES:
        return PHRASES[text]
    match = WORD.fullmatch(text)
    return EXPRESSIONS[match[1]] if match else _number(int(text))


def _figure(number: int) -> str:
    return f"{{{{ {_number(number)} }}}}"


def _number(number: int) -> str | None:
    if number in FIGURES:
        return FIGURES[number]
    for base, expression in ADDED.items():
        if 0 < number - base <= LARGEST_ADDED:
            return f"(add {expression} {number - base})"
    return None


def main(folder: Path) -> None:
    """Write the made files into the chart's folder, in place of those that are there."""
    for old in (folder / "templates").glob("*.yaml"):
        if old.read_text(encoding="utf-8").startswith(HEADER):
            old.unlink()
    for name, text in chart_files().items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


WORDS = Words(
    conditions=tuple(_facts(draw_plan(_chance(), sure=True)[0])),
    loop_of=_loop_of,
    variables=_variables,
    bound=_bound,
)

if __name__ == "__main__":
    main(Path(sys.argv[1]))
