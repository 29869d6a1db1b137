"""Who serves admin pages and who asks them take the same options everywhere; settings make values of them."""

import logging
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from extproc.cli import build
from kvmesh.admin.admin_access import AdminAccess
from kvmesh.admin.admin_login import AdminLogin
from kvmesh.admin.admin_options import ACCESS, LOGIN, with_admin_access, with_admin_login
from kvmesh.redis.address import RedisAccess
from kvmesh.redis.options import with_redis
from tests.unit.kvmesh_redis.test_kv_redis_options import commands


def test_every_command_that_serves_or_asks_admin_pages_takes_all_that_belongs_to_it() -> None:
    found = dict(commands(build()))
    serving = {name for name, options in found.items() if set(ACCESS) <= set(options)}
    asking = {name for name, options in found.items() if "token_file" in options}
    assert serving == {"extproc", "indexer"}
    assert {"explain", "doctor", "policy explain"} <= asking
    assert {name for name, options in found.items() if set(ACCESS) & set(options)} == serving | {"up"}
    assert all(set(LOGIN) <= set(found[name]) for name in asking)


@pytest.mark.parametrize("outermost", [with_redis, with_admin_access])
def test_options_of_both_kinds_may_be_given_to_one_command_in_any_order(
    outermost: Callable[..., Callable[..., None]],
) -> None:
    seen: list[object] = []

    def role(access: RedisAccess, admin: AdminAccess, *, port: int = 1) -> None:
        seen.extend((access, admin, port))

    both = with_redis(with_admin_access(role)) if outermost is with_redis else with_admin_access(with_redis(role))
    app = typer.Typer()
    app.command()(both)
    flags = ["--port=2", "--redis=redis://h:1/0", "--admin-token-file=t", "--admin-tls-cert=c", "--admin-client-ca=a"]
    done = CliRunner().invoke(app, flags)
    assert done.exit_code == 0, done.output
    access = AdminAccess(token_file=Path("t"), tls_cert=Path("c"), client_ca=Path("a"))
    assert seen == [RedisAccess(url="redis://h:1/0"), access, 2]


def test_what_is_of_no_use_alone_is_wrong_usage(tmp_path: Path) -> None:
    def nothing(login: AdminLogin) -> None:
        raise AssertionError(login)

    app = typer.Typer()
    app.command()(with_admin_login(nothing))
    done = CliRunner().invoke(app, [f"--key={tmp_path / 'key'}"])
    assert (done.exit_code, "--key without --cert" in done.output) == (2, True)


@pytest.mark.parametrize(
    ("url", "given_as", "warned"),
    [
        ("redis://:hunter2@h:1/0", "--redis=redis://:hunter2@h:1/0", True),
        ("redis://h:1/0", "--redis=redis://h:1/0", False),
        ("redis://:hunter2@h:1/0", "--port=1", False),  # from the environment
    ],
)
def test_a_password_that_is_a_flag_is_warned_of_and_not_repeated(
    url: str, given_as: str, warned: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[RedisAccess] = []
    monkeypatch.setattr(sys, "argv", ["kvmesh", "indexer", given_as])

    def keep(access: RedisAccess) -> None:
        seen.append(access)

    with caplog.at_level(logging.WARNING):
        with_redis(keep)(
            redis=url,
            redis_username=None,
            redis_password_file=None,
            redis_sentinel_password_file=None,
            redis_ca_file=None,
            redis_cert_file=None,
            redis_key_file=None,
            redis_server_name=None,
        )
    assert seen == [RedisAccess(url=url)]
    assert ("--redis-password-file" in caplog.text) is warned
    assert "hunter2" not in caplog.text
