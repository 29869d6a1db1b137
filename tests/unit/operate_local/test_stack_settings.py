"""How `kvmesh up` reads --endpoints and --event-sources, and what it takes of Redis."""

import json
import socket
from pathlib import Path

import pytest

from operate.local.envoy_config import SocketAddress
from operate.local.errors import BadEndpointError, BadSettingError
from operate.local.stack_settings import StackSettings, completed, resolve, resolve_event_sources


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


@pytest.mark.parametrize("text", ["localhost", "localhost:0", "localhost:²", ":8000", "::1:8000"])
def test_an_entry_that_is_no_address_is_named(text: str) -> None:
    with pytest.raises(BadEndpointError, match=r"is not HOST:PORT"):
        resolve(text)


def test_a_name_that_no_dns_could_hold_is_named() -> None:
    with pytest.raises(BadEndpointError, match=r"^endpoint a\.\.b:8000: "):
        resolve("a..b:8000")


SOURCE = {"events": "tcp://*:5557", "replay": "tcp://*:5558"}
PODS = (SocketAddress(host="10.0.0.1", port=8000), SocketAddress(host="127.0.0.1", port=8000))


@pytest.mark.parametrize(
    ("written", "key"),
    [
        ("pod-0.invalid:8000", "pod-0.invalid:8000"),
        ("10.0.0.1:8000", "10.0.0.1:8000"),
        ("localhost:8000", "127.0.0.1:8000"),
        ("127.0.0.1:8000", "127.0.0.1:8000"),
        ("127.0.0.1:9000", "127.0.0.1:9000"),
        ("no such pod", "no such pod"),
    ],
)
def test_an_event_source_is_found_by_the_name_and_by_the_address_of_its_pod(written: str, key: str) -> None:
    assert json.loads(resolve_event_sources(json.dumps({written: SOURCE}), endpoints=PODS)) == {key: SOURCE}


def test_a_name_of_several_addresses_is_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter(["10.0.0.1", "10.0.0.2"])

    def asked(host: str, port: int, **_: object) -> list[tuple[object, ...]]:
        return [(socket.AF_INET, None, None, host, (next(answers), port))]

    monkeypatch.setattr(socket, "getaddrinfo", asked)
    name = "several-addresses.invalid:8000"
    pods = resolve(name)
    assert json.loads(resolve_event_sources(json.dumps({name: SOURCE}), endpoints=pods)) == {"10.0.0.1:8000": SOURCE}


def test_event_sources_of_pods_that_this_run_does_not_use_stay_as_they_are() -> None:
    text = json.dumps({"pod-0.invalid:8000": SOURCE})

    assert json.loads(resolve_event_sources(text, endpoints=())) == {"pod-0.invalid:8000": SOURCE}
    assert resolve_event_sources("", endpoints=PODS) == "{}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "--event-sources is not JSON: "),
        ("[]", "--event-sources must map HOST:PORT to addresses, not be "),
        ('{"localhost:8000": {}, "127.0.0.1:8000": {}}', "two keys of --event-sources are the same pod: localhost"),
    ],
)
def test_event_sources_that_cannot_be_meant_are_refused(text: str, message: str) -> None:
    with pytest.raises(BadSettingError, match=f"^{message}"):
        resolve_event_sources(text, endpoints=PODS)


@pytest.mark.parametrize(
    ("pods", "model", "tokenizer"), [((), "tiny", Path("/tiny")), (PODS, None, None)], ids=["simulated", "real"]
)
def test_simulated_pods_have_a_model_and_a_tokenizer(
    pods: tuple[SocketAddress, ...], model: str | None, tokenizer: Path | None
) -> None:
    found = completed(StackSettings(endpoints=pods), simulated_tokenizer=Path("/tiny"), shared_flags=("--x",))
    assert (found.model, found.tokenizer_folder, found.shared_flags) == (model, tokenizer, ("--x",))


def test_chaos_needs_simulated_pods_of_which_one_is_left() -> None:
    assert StackSettings(chaos=20.0).chaos
    for given in ({"endpoints": PODS}, {"simulated_pods": 1}):
        with pytest.raises(BadSettingError, match=r"^--chaos kills simulated pods only, and needs two: "):
            StackSettings(chaos=20.0, **given)


def test_all_answers_of_simulated_pods_are_read_unless_something_else_is_asked_for() -> None:
    def share(settings: StackSettings) -> float | None:
        return completed(settings, simulated_tokenizer=Path("/tiny"), shared_flags=()).sample_share

    real = resolve("127.0.0.1:8000")
    assert (share(StackSettings()), share(StackSettings(sample_share=0.0))) == (1.0, 0.0)
    assert (share(StackSettings(endpoints=real)), share(StackSettings(endpoints=real, sample_share=0.5))) == (None, 0.5)
