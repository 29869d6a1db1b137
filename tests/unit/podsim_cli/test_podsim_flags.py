"""What the flags of `sim` make of a pod's engine."""

from typing import Any

import pytest
from typer.testing import CliRunner

from podsim import cli
from podsim.core.scheduler import EngineSettings
from podsim.pod import PodSettings


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

    async def serve(settings: PodSettings, *_: Any, **__: Any) -> None:
        served.append(settings)

    monkeypatch.setattr(cli, "_serve_until_stopped", serve)
    result = CliRunner().invoke(cli.app, list(flags))
    assert (result.exit_code, [settings.engine for settings in served]) == (0, [engine])


def test_a_step_of_no_tokens_is_refused() -> None:
    result = CliRunner().invoke(cli.app, ["--max-num-batched-tokens", "0"])
    assert result.exit_code == 2
