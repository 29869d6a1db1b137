"""`kvmesh plan`: asks a running picker what pods it wants, plans for a trace, and shows both as tables."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import aiohttp
import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from extproc.errors import ConfigError, KvmeshError
from extproc.local.live_view import error_words
from extproc.scaling.plan import Plan, PlannedRole, PlannedVariant
from extproc.scaling.trace_plan import TracePlan, declared_role
from kvmesh.admin.admin_login import AdminLogin
from kvmesh.plain_text import printable

UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
MOST_SECONDS = 7 * 86_400.0
POD_NUMBERS = ("prefill", "decode", "streams", "price", "min", "max")
ROLES = ("both", "prefill", "decode")


async def ask(url: str, *, seconds: float, pool: str | None, timeout_seconds: float, login: AdminLogin) -> list[Plan]:
    """Return the plan of each pool, or of one. Raise KvmeshError naming an address without answer."""
    timeout = aiohttp.ClientTimeout(total=timeout_seconds)
    query = {"seconds": f"{seconds:g}"} | ({"pool": pool} if pool else {})
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.get(
                f"{url.rstrip('/')}/v1/plan",
                params=query,
                headers=login.headers(),
                ssl=login.tls(),
                allow_redirects=False,
            ) as response,
        ):
            if response.status == 404 and pool is not None:
                raise ConfigError(f"--pool: {error_words(await response.read())}")
            if response.status != 200:
                raise KvmeshError(f"{url} answered {response.status}: {printable((await response.text())[:200])}")
            return msgspec.json.decode(await response.read(), type=list[Plan])
    except aiohttp.InvalidURL as error:
        raise ConfigError(f"--picker {url!r} is not a URL like http://127.0.0.1:9090") from error
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        raise KvmeshError(f"{url} is not a picker's admin page: its answer is no plan") from error
    except (TimeoutError, aiohttp.ClientError) as error:
        raise KvmeshError(f"the picker's admin page at {url} does not answer: {str(error) or 'timed out'}") from error


def seconds_of(text: str, *, flag: str) -> float:
    """Read a duration like 90s, 15m, 1h, 2d, or seconds. Raise ConfigError."""
    unit = UNITS.get(text[-1:])
    try:
        seconds = float(text[:-1]) * unit if unit is not None else float(text)
    except ValueError:
        seconds = -1.0
    if not 0.0 < seconds <= MOST_SECONDS:
        raise ConfigError(f"{flag} {text!r}: a duration up to 7d is needed, like 90s, 15m or 1h")
    return seconds


def declared_roles(pods: Sequence[str]) -> list[PlannedRole]:
    """Read what `--pod` says: `name=h100,prefill=9000,decode=2500,price=4`, and a role. Raise ConfigError."""
    by_role: dict[str, list[dict[str, float | str]]] = {}
    for text in pods:
        given: dict[str, float | str] = {"name": ""}
        for part in text.split(","):
            name, equals, value = part.strip().partition("=")
            if not equals or name not in (*POD_NUMBERS, "name", "role"):
                raise ConfigError(f"--pod {text!r}: {part!r} is none of name=, role=, {'=, '.join(POD_NUMBERS)}=")
            given[name] = value if name in ("name", "role") else _number(text, name, value)
        role = str(given.pop("role", "both"))
        if role not in ROLES:
            raise ConfigError(f"--pod {text!r}: the role is {role!r}; it may be {', '.join(ROLES)}")
        if "prefill" not in given:
            raise ConfigError(f"--pod {text!r}: prefill= is missing: prompt tokens that a pod computes in a second")
        by_role.setdefault(role, []).append(given)
    for variants in by_role.values():
        names = sorted(str(each["name"]) for each in variants)
        if double := next((name for name, following in pairwise(names) if name == following), None):
            raise ConfigError(f"--pod: {double!r} is there twice; give each a name= of its own")
        if len(names) > 1 and "" in names:
            raise ConfigError("--pod: of several kinds of pods each needs a name=")
    return [declared_role(role, variants) for role, variants in by_role.items()]


def _number(text: str, name: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = -1.0
    if not 0.0 <= number <= 1e9 or (number == 0.0 and name != "min"):
        raise ConfigError(f"--pod {text!r}: {name} must be a number above 0")
    return number


def show(plans: Sequence[Plan], console: Console) -> None:
    """Print plans for a person. What pools and policies are called is shown as text, never as markup."""
    for plan in plans:
        _show(plan, console)


def show_trace(plan: TracePlan, console: Console) -> None:
    """Print the plan of a trace."""
    console.print(Text(f"{plan.requests:,} requests in {plan.seconds:,.0f} s, in slots of {plan.slot_seconds:g} s"))
    for each in (plan.average, plan.busiest):
        _show(each, console)
    words = f"pods that follow each slot: {plan.pod_hours:.2f} pod hours"
    if plan.cost is not None and plan.cost_per_million_tokens is not None:
        currency = plan.average.currency
        words += f", {_money(plan.cost)} {currency}, {_money(plan.cost_per_million_tokens)} {currency} a million tokens"
    console.print(Text(printable(" ".join(words.split()))))


def _show(plan: Plan, console: Console) -> None:
    for line in _facts(plan):
        console.print(Text(printable(line)))
    if plan.roles:
        console.print(_table(plan.roles, plan.currency))
    for role in plan.roles:
        console.print(Text(printable(f"{role.role}: {role.reason}")))
        for variant in role.variants:
            name = f"{role.role}/{variant.name}" if variant.name else role.role
            console.print(Text(printable(f"  a pod of {name}: {variant.reason}")))
    console.print()


def _facts(plan: Plan) -> Iterator[str]:
    promised = [
        f"{name} {seconds:g} s"
        for name, seconds in (("first token", plan.ttft_seconds), ("each token", plan.inter_token_seconds))
        if seconds is not None
    ]
    yield f"{plan.pool or 'pool'}: {plan.of}; promised: {', '.join(promised) or 'nothing'}"
    if not plan.roles:
        yield "no policy of this pool names a role in spec.autoscale: nothing is planned"
    if plan.ratio:
        yield plan.ratio


def _table(roles: Sequence[PlannedRole], currency: str) -> Table:
    """A line for each variant, and one for a role with several."""
    table = Table(box=None, padding=(0, 1, 0, 0))  # fits a terminal of 80 columns
    table.add_column("\nrole", no_wrap=True)
    money = printable(currency) or "cost"
    for heading in (
        *("prefill\ntok/s", "decode\ntok/s", "input\ntok/s", "cached\ntok/s", "output\ntok/s", "\npods", "\nwanted"),
        *(f"{money}\nan hour", f"{money} a\nmillion"),
    ):
        table.add_column(Text(heading), justify="right")
    for role in roles:
        several = len(role.variants) > 1
        for variant in role.variants if several else ():
            cost = None if variant.pod_hour_price is None else variant.pod_hour_price * variant.wanted
            table.add_row(
                Text(printable(f"{role.role}/{variant.name or 'others'}")),
                *_capacity(variant),
                *("", "", ""),
                *(str(variant.present), str(variant.wanted), _money(cost), ""),
            )
        whole = ("", "") if several or not role.variants else _capacity(role.variants[0])
        demand = role.demand
        table.add_row(
            Text(printable(role.role)),
            *whole,
            *(f"{rate:,.0f}" for rate in (demand.input, demand.cached, demand.output)),
            *(str(role.present), str(role.wanted)),
            *(_money(role.cost_per_hour), _money(role.cost_per_million_tokens)),
        )
    return table


def _capacity(variant: PlannedVariant) -> tuple[str, str]:
    rates = (variant.prefill_tokens_per_second, variant.decode_tokens_per_second)
    prefill, decode = ("?" if rate is None else f"{rate:,.0f}" for rate in rates)
    return prefill, decode


def _money(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}" if value >= 0.1 or value == 0.0 else f"{value:.2g}"
