"""What the flags of `sim` make of a pod's engine."""

from typing import Any

import pytest
from typer.testing import CliRunner

from podsim import cli, server
from podsim.core.link import LinkSettings
from podsim.core.scheduler import EngineSettings
from podsim.pod import PodSettings
from podsim.wire.kv_transfer import KvTransferConfig


@pytest.mark.parametrize(
    ("flags", "engine"),
    [
        ((), EngineSettings()),
        (("--max-num-seqs", "3"), EngineSettings(max_running=3)),
        (("--max-num-batched-tokens", "512"), EngineSettings(max_step_tokens=512)),
    ],
    ids=["none", "sequences", "tokens of a step"],
)
def test_limits_of_a_step_reach_the_engine(
    flags: tuple[str, ...], engine: EngineSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[PodSettings] = []

    def serve(settings: PodSettings, *_: Any, **__: Any) -> None:
        served.append(settings)

    monkeypatch.setattr(server, "serve_until_stopped", serve)
    result = CliRunner().invoke(cli.app, list(flags))
    assert (result.exit_code, [settings.engine for settings in served]) == (0, [engine])


NIXL = (
    '{"kv_connector": "NixlConnector", "kv_role": "kv_consumer", "kv_connector_extra_config": {"kv_lease_duration": 9}}'
)


def test_kv_transfers_and_their_link_reach_the_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[PodSettings] = []

    def serve(settings: PodSettings, *_: Any, **__: Any) -> None:
        served.append(settings)

    monkeypatch.setattr(server, "serve_until_stopped", serve)
    link = ("--kv-bytes-per-token", "7", "--kv-link-bytes-per-second", "1e6", "--kv-link-seconds", "0.5")
    for flags in ((), ("--kv-transfer-config", NIXL, *link)):
        assert CliRunner().invoke(cli.app, list(flags)).exit_code == 0
    assert [(settings.kv_transfer, settings.kv_link) for settings in served] == [
        (None, LinkSettings()),
        (
            KvTransferConfig(kv_role="kv_consumer", kv_lease_duration=9),
            LinkSettings(bytes_per_token=7, bytes_per_second=1e6, fixed_seconds=0.5),
        ),
    ]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--kv-transfer-config", '{"kv_connector": "NixlConnector"}'), "Please specify kv_role"),
        (
            ("--pods", "2", "--kv-transfer-config", NIXL[:-1] + ', "engine_id": "e"}'),
            "one engine_id cannot name 2 pods",
        ),
    ],
    ids=["no role", "one engine for two"],
)
def test_a_transfer_configuration_that_cannot_be_is_refused(flags: tuple[str, ...], words: str) -> None:
    result = CliRunner().invoke(cli.app, list(flags))
    assert (result.exit_code, words in result.output) == (1, True)


def test_a_step_of_no_tokens_is_refused() -> None:
    result = CliRunner().invoke(cli.app, ["--max-num-batched-tokens", "0"])
    assert result.exit_code == 2
