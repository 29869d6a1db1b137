"""Who may see the admin pages, judged by what a request says."""

from dataclasses import replace
from pathlib import Path

import pytest

from kvmesh.admin.admin_access import (
    CROSS_SITE,
    NOT_SET_UP,
    STRANGE_HOST,
    AdminAccess,
    PageRequest,
    Refusal,
    is_loopback,
    needs_token,
    refusal,
)
from kvmesh.errors import SettingError

CURL = PageRequest(
    is_open=False,
    is_read=True,
    host="127.0.0.1:9090",
    origin=None,
    fetch_site=None,
    fetch_mode=None,
    has_certificate=False,
)
NOTHING = AdminAccess()
TOKEN = AdminAccess(token_file=Path("token"))
CERTIFICATES = AdminAccess(tls="cert", client_ca=Path("ca"))


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", None),
        ("127.0.0.1:9090", None),
        ("127.9.9.9:1", None),
        ("localhost:9090", None),
        ("LOCALHOST.", None),
        ("[::1]:9090", None),
        ("evil.example.com:9090", STRANGE_HOST),
        ("localhost.evil.example.com", STRANGE_HOST),
        ("127.0.0.1.evil.example.com", STRANGE_HOST),
        ("127.0.0.1@evil.example.com", STRANGE_HOST),
        ("evil.example.com#@127.0.0.1", STRANGE_HOST),
        ("127.0.0.1:port", STRANGE_HOST),
        ("10.0.0.1:9090", STRANGE_HOST),
        ("[::1", STRANGE_HOST),
        ("", STRANGE_HOST),
        (None, STRANGE_HOST),
    ],
)
def test_open_pages_on_loopback_answer_to_this_machines_names_alone(host: str | None, expected: Refusal | None) -> None:
    assert refusal(replace(CURL, host=host), NOTHING, is_loopback=True) is expected
    assert refusal(replace(CURL, host=host, is_open=True), NOTHING, is_loopback=True) is expected


def test_any_name_may_be_asked_for_where_a_token_is_needed() -> None:
    request = replace(CURL, host="kvmesh.example.com")
    assert refusal(request, TOKEN, is_loopback=True) is None
    assert refusal(request, TOKEN, is_loopback=False) is None
    assert needs_token(request, TOKEN)


def test_beyond_loopback_nobody_sees_anything_but_open_pages_until_access_is_set_up() -> None:
    assert refusal(CURL, NOTHING, is_loopback=False) is NOT_SET_UP
    assert refusal(replace(CURL, is_open=True, host="10.0.0.1"), NOTHING, is_loopback=False) is None
    only_tls = AdminAccess(tls="cert")
    assert refusal(CURL, only_tls, is_loopback=False) is NOT_SET_UP
    for words in ("--admin-token-file", "--admin-client-ca", "--host 127.0.0.1"):
        assert words in NOT_SET_UP.message


def test_a_certificate_stands_for_a_token_and_open_pages_need_neither() -> None:
    both = replace(CERTIFICATES, token_file=Path("token"))
    assert not needs_token(replace(CURL, has_certificate=True), both)
    assert needs_token(CURL, CERTIFICATES)
    assert not needs_token(replace(CURL, is_open=True), both)
    assert not needs_token(CURL, NOTHING)


@pytest.mark.parametrize(
    ("site", "mode", "origin", "is_read", "expected"),
    [
        (None, None, None, False, None),  # curl
        ("same-origin", "cors", "http://127.0.0.1:9090", False, None),
        ("none", "navigate", None, True, None),  # typed into the address bar
        ("cross-site", "cors", "https://evil.example.com", False, CROSS_SITE),
        ("cross-site", "no-cors", None, True, CROSS_SITE),  # <script src=…>
        ("same-site", "cors", "http://other.localhost", False, CROSS_SITE),
        ("cross-site", "navigate", None, True, None),  # a link from another page
        ("cross-site", "navigate", "https://evil.example.com", False, CROSS_SITE),  # a form
        (None, None, "http://127.0.0.1:9090", False, None),
        (None, None, "http://127.0.0.1:9091", False, CROSS_SITE),
        (None, None, "null", False, CROSS_SITE),
        (None, None, "http://[", False, CROSS_SITE),
        (None, None, "https://evil.example.com", True, CROSS_SITE),
    ],
)
@pytest.mark.parametrize("access", [NOTHING, TOKEN])
def test_what_a_browser_sends_for_another_site_is_refused(
    site: str | None, mode: str | None, origin: str | None, is_read: bool, expected: Refusal | None, access: AdminAccess
) -> None:
    request = replace(CURL, fetch_site=site, fetch_mode=mode, origin=origin, is_read=is_read)
    assert refusal(request, access, is_loopback=True) is expected


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("::1", True),
        ("[::1]", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("localhost.example.com", False),
        ("", False),
    ],
)
def test_only_this_machines_own_addresses_count_as_loopback(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


def test_settings_that_are_of_no_use_alone_are_refused() -> None:
    with pytest.raises(SettingError, match="--admin-client-ca needs TLS"):
        AdminAccess(client_ca=Path("ca"))
