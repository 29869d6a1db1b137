"""`kvmesh plan`: fetches the desired pods from a running picker, and shows them as tables."""

from collections.abc import Iterator, Sequence

import aiohttp
import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from extproc.errors import ConfigError, KvmeshError
from extproc.scaling.plan import Plan, PlannedRole, PlannedVariant
from kvmesh.admin.admin_login import AdminLogin
from kvmesh.bounded_answer import read_within
from kvmesh.plain_text import printable
from operate.local.live_view import error_words


async def ask(url: str, *, seconds: float, pool: str | None, timeout_seconds: float, login: AdminLogin) -> list[Plan]:
    """Return the plan of one pool or of all. Raise KvmeshError if the address does not answer."""
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
            answer = await read_within(response)
            if response.status == 404 and pool is not None:
                raise ConfigError(f"--pool: {error_words(answer)}")
            if response.status != 200:
                words = answer[:200].decode(errors="replace")
                raise KvmeshError(f"{url} answered {response.status}: {printable(words)}")
            return msgspec.json.decode(answer, type=list[Plan])
    except aiohttp.InvalidURL as error:
        raise ConfigError(f"--picker {url!r} is not a URL like http://127.0.0.1:9090") from error
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        raise KvmeshError(f"{url} is not a picker's admin page: its answer is no plan") from error
    except (TimeoutError, aiohttp.ClientError) as error:
        raise KvmeshError(f"the picker's admin page at {url} does not answer: {str(error) or 'timed out'}") from error


def show(plans: Sequence[Plan], console: Console) -> None:
    """Print the plans as tables. Names are printed as plain text, never as markup."""
    for plan in plans:
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
