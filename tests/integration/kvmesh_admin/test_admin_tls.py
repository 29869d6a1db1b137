"""The admin pages over TLS: client certificates open them, and certificates are renewed without a restart."""

import asyncio
import ssl
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest

from extproc.errors import ConfigError
from kvmesh.admin.admin_access import AdminAccess
from kvmesh.admin.admin_login import AdminLogin
from kvmesh.errors import SettingError
from tests.integration.admin_doors import BOTH_ROLES, HOST, Door, Pages, picker_door
from tests.integration.kv_tls import Certificate, make_authority, make_certificate

TOKEN = "correct-horse-battery"


@dataclass(frozen=True, slots=True, kw_only=True)
class Papers:
    """Two authorities, and what they have signed."""

    ours: Certificate
    theirs: Certificate
    server: Certificate
    client: Certificate
    stranger: Certificate


@pytest.fixture(scope="module")
def papers(tmp_path_factory: pytest.TempPathFactory) -> Papers:
    folder = tmp_path_factory.mktemp("papers")
    ours, theirs = make_authority(folder, "ours"), make_authority(folder, "theirs")
    return Papers(
        ours=ours,
        theirs=theirs,
        server=make_certificate(folder, "localhost", authority=ours),
        client=make_certificate(folder, "operator", authority=ours),
        stranger=make_certificate(folder, "stranger", authority=theirs),
    )


def login(papers: Papers, shown: Certificate | None = None, *, token: Path | None = None) -> AdminLogin:
    return AdminLogin(
        ca_file=papers.ours.cert,
        cert=shown.files if shown else None,
        token_file=token,
    )


async def ask(port: int, page: str, by: AdminLogin) -> tuple[int, str]:
    """Ask on a connection of its own; return the status and what came."""
    timeout = aiohttp.ClientTimeout(total=10)
    async with (
        aiohttp.ClientSession(timeout=timeout) as http,
        http.get(f"https://localhost:{port}{page}", headers=by.headers(), ssl=by.tls()) as answer,
    ):
        return answer.status, await answer.text()


@BOTH_ROLES
async def test_a_certificate_of_the_authority_opens_the_pages(door: Door, page: str, papers: Papers) -> None:
    access = AdminAccess(tls=papers.server.files, client_ca=papers.ours.cert)
    async with door(access) as port:
        assert (await ask(port, page, login(papers, papers.client)))[0] == 200
        status, words = await ask(port, page, login(papers))
        assert (status, "certificate-missing" in words) == (403, True)
        assert (await ask(port, "/healthz", login(papers)))[0] == 200
        assert (await ask(port, "/metrics", login(papers)))[0] == 200
        with pytest.raises(aiohttp.ClientError):
            await ask(port, "/healthz", login(papers, papers.stranger))
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await ask(port, "/healthz", AdminLogin(ca_file=papers.theirs.cert))


async def test_a_token_opens_them_as_well_where_both_are_set_up(papers: Papers, tmp_path: Path) -> None:
    (tmp_path / "token").write_text(TOKEN)
    access = AdminAccess(
        tls=papers.server.files,
        client_ca=papers.ours.cert,
        token_file=tmp_path / "token",
    )
    async with picker_door(access) as port:
        assert (await ask(port, "/state", login(papers, token=tmp_path / "token")))[0] == 200
        assert (await ask(port, "/state", login(papers, papers.client)))[0] == 200
        assert (await ask(port, "/state", login(papers)))[0] == 401


async def test_who_shows_both_has_no_prompt_explained_with_the_admin_token(papers: Papers, tmp_path: Path) -> None:
    (tmp_path / "token").write_text(TOKEN)
    access = AdminAccess(
        tls=papers.server.files,
        client_ca=papers.ours.cert,
        token_file=tmp_path / "token",
    )
    pages, both = Pages(), login(papers, papers.client, token=tmp_path / "token")
    async with picker_door(access, pages=pages) as port, aiohttp.ClientSession() as http:
        for headers in (both.headers(), {"authorization": "Bearer a client's own"}):
            url = f"https://localhost:{port}/v1/explain"
            async with http.post(url, data=b"{}", headers=headers, ssl=both.tls()) as answer:
                assert answer.status == 200
    with_token, with_another = (facts.headers.get("authorization") for facts in pages.explained)
    assert (with_token, with_another) == (None, "Bearer a client's own")


async def test_renewed_certificates_and_authorities_count_from_the_next_connection_on(
    papers: Papers, tmp_path: Path
) -> None:
    cert, key, ca = (tmp_path / name for name in ("tls.crt", "tls.key", "ca.crt"))
    for target, source in ((cert, papers.server.cert), (key, papers.server.key), (ca, papers.ours.cert)):
        target.write_bytes(source.read_bytes())
    async with picker_door(AdminAccess(tls=f"{cert},{key}", client_ca=ca)) as port:
        assert (await ask(port, "/state", login(papers, papers.client)))[0] == 200
        first = await shown(port)

        ca.write_bytes(papers.theirs.cert.read_bytes())  # who was let in no longer is
        with pytest.raises(aiohttp.ClientError):
            await ask(port, "/state", login(papers, papers.client))
        assert (await ask(port, "/state", login(papers, papers.stranger)))[0] == 200

        key.write_text("half written")  # the old one goes on
        assert await shown(port) == first
        renewed = make_certificate(tmp_path, "localhost", authority=papers.ours)
        cert.write_bytes(renewed.cert.read_bytes())
        key.write_bytes(renewed.key.read_bytes())
        assert await shown(port) != first
        assert (await ask(port, "/state", login(papers, papers.stranger)))[0] == 200


async def shown(port: int) -> bytes:
    """Return the certificate that a new connection is shown."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    async with asyncio.timeout(10):
        _, writer = await asyncio.open_connection(HOST, port, ssl=context)
        found: bytes = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        writer.close()
    return found


async def test_nothing_older_than_tls_1_3_is_spoken(papers: Papers) -> None:
    old = ssl.create_default_context(cafile=str(papers.ours.cert))
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    async with (
        picker_door(AdminAccess(tls=papers.server.files)) as port,
        aiohttp.ClientSession() as http,
    ):
        with pytest.raises(aiohttp.ClientConnectorError):
            await http.get(f"https://localhost:{port}/healthz", ssl=old)
        assert (await ask(port, "/state", login(papers)))[0] == 200


async def test_certificates_that_cannot_be_used_are_named_at_the_start(papers: Papers, tmp_path: Path) -> None:
    (tmp_path / "none.pem").write_text("nothing")
    for access, words in (
        (AdminAccess(tls=str(tmp_path / "absent.pem")), "--admin-tls .*absent.pem: .*No such file"),
        (AdminAccess(tls=f"{papers.server.cert},{papers.client.key}"), "--admin-tls .*key values mismatch"),
        (
            AdminAccess(tls=papers.server.files, client_ca=tmp_path / "none.pem"),
            "--admin-client-ca .*none.pem: no certificates",
        ),
    ):
        with pytest.raises(ConfigError, match=words):
            async with picker_door(access):
                pass
    with pytest.raises(SettingError, match=r"--ca .*none\.pem"):
        AdminLogin(ca_file=tmp_path / "none.pem").tls()
