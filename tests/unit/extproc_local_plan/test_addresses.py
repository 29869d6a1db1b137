"""How --endpoints is read."""

import pytest

from extproc.local.addresses import resolve
from extproc.local.envoy_config import SocketAddress
from extproc.local.errors import BadEndpointError


def test_ip_addresses_keep_their_order() -> None:
    assert resolve("127.0.0.2:8000, [::1]:8001,127.0.0.1:8000") == (
        SocketAddress(host="127.0.0.2", port=8000),
        SocketAddress(host="::1", port=8001),
        SocketAddress(host="127.0.0.1", port=8000),
    )


def test_no_endpoints_are_no_addresses() -> None:
    assert resolve("") == ()


def test_a_name_becomes_the_address_that_envoy_will_have() -> None:
    assert resolve("localhost:8000") == (SocketAddress(host="127.0.0.1", port=8000),)


def test_two_names_of_one_address_are_refused() -> None:
    with pytest.raises(BadEndpointError, match="are the same address"):
        resolve("localhost:8000,127.0.0.1:8000")


@pytest.mark.parametrize("text", ["localhost", "localhost:0", ":8000", "::1:8000"])
def test_an_entry_that_is_no_address_is_named(text: str) -> None:
    with pytest.raises(BadEndpointError, match=r"is not HOST:PORT"):
        resolve(text)
