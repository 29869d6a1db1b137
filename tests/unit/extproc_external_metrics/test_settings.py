"""Which settings fit together."""

from pathlib import Path
from typing import Any

import pytest

from extproc.errors import ConfigError
from extproc.external_metrics.settings import ExternalMetricsSettings
from extproc.settings.config import PickerSettings

CERT = Path("tls.crt")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"port": 9443}, "without --external-metrics-cert"),
        ({"cert": CERT}, "without --external-metrics-port"),
        ({"key": CERT}, "without --external-metrics-port"),
    ],
)
def test_one_without_another_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ExternalMetricsSettings(**given)


def test_the_cluster_has_to_say_who_may_ask() -> None:
    asked = ExternalMetricsSettings(port=9443, cert=CERT)
    assert PickerSettings(kubernetes=True, external_metrics=asked).external_metrics is asked
    with pytest.raises(ConfigError, match="without --kubernetes"):
        PickerSettings(endpoints=("127.0.0.1:8000",), external_metrics=asked)


def test_a_port_of_its_own_is_needed() -> None:
    with pytest.raises(ConfigError, match="give it one of its own"):
        PickerSettings(kubernetes=True, external_metrics=ExternalMetricsSettings(port=9090, cert=CERT))
