"""Who is let in, by what the cluster says of its API server."""

import json
from typing import Any

import pytest

from extproc.external_metrics.front_proxy import NAMESPACE, READER_ROLE, FrontProxyError, read_front_proxy
from extproc.install import external_metrics as installed

PEM = "-----BEGIN CERTIFICATE-----\n..."
USER = {"X-Remote-User": "system:serviceaccount:kube-system:horizontal-pod-autoscaler"}


def config_map(**changes: Any) -> dict[str, Any]:
    data = {
        "requestheader-client-ca-file": PEM,
        "requestheader-allowed-names": json.dumps(["front-proxy-client"]),
        "requestheader-username-headers": json.dumps(["X-Remote-User"]),
        "client-ca-file": "other people's",
    } | changes
    return {"kind": "ConfigMap", "data": {key: value for key, value in data.items() if value is not None}}


def peer(name: str) -> dict[str, Any]:
    return {"subject": ((("organizationName", "x"),), (("commonName", name),))}


def test_only_the_certificate_of_that_name_with_a_user_is_let_in() -> None:
    proxy = read_front_proxy(config_map())
    assert proxy.authorities == PEM
    assert proxy.refusal(peer("front-proxy-client"), USER) is None
    nobody: tuple[dict[str, Any] | None, ...] = (None, {})
    for given in nobody:
        assert proxy.refusal(given, USER) == (
            401,
            "only the API server may ask here, with its front-proxy client certificate",
        )
    refused = proxy.refusal(peer("admin"), USER)
    assert refused is not None
    assert refused[0] == 403
    assert "the client certificate is that of 'admin'; only front-proxy-client may ask" in refused[1]
    assert proxy.refusal(peer("front-proxy-client"), {}) == (401, "no user is named in X-Remote-User")


def test_a_cluster_that_names_none_lets_every_certificate_of_its_authority_in() -> None:
    proxy = read_front_proxy(config_map(**{"requestheader-allowed-names": "[]"}))
    assert proxy.refusal(peer("any"), USER) is None
    assert proxy.refusal(None, USER) is not None


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({}, "has no requestheader-client-ca-file: the API server runs without --requestheader-client-ca-file"),
        (config_map(**{"requestheader-client-ca-file": "garbage"}), "has no requestheader-client-ca-file"),
        (config_map(**{"requestheader-allowed-names": "front-proxy-client"}), "is no JSON list of names"),
        (config_map(**{"requestheader-allowed-names": '{"a": 1}'}), "is no JSON list of names"),
        (config_map(**{"requestheader-username-headers": None}), "names no requestheader-username-headers"),
    ],
)
def test_a_config_map_that_opens_nothing_is_refused_in_words(document: dict[str, Any], words: str) -> None:
    with pytest.raises(FrontProxyError) as raised:
        read_front_proxy(document)
    assert words in str(raised.value)


def test_what_is_installed_is_what_is_read_and_served() -> None:
    assert (installed.READER_NAMESPACE, installed.READER_ROLE) == (NAMESPACE, READER_ROLE)
