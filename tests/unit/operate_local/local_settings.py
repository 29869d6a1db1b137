"""Settings of `kvmesh up` as the flags' defaults give them, for tests that plan or report."""

from pathlib import Path

from operate.local.envoy_config import SocketAddress
from operate.local.stack_settings import StackSettings


def settings(
    *,
    endpoints: tuple[SocketAddress, ...] = (),
    model: str | None = "tiny",
    tokenizer: Path | None = Path("/tok"),
    event_sources: str | None = None,
    shared_flags: tuple[str, ...] = (),
) -> StackSettings:
    return StackSettings(
        simulated_pods=2,
        endpoints=endpoints,
        model=model,
        tokenizer_folder=tokenizer,
        event_sources=event_sources,
        shared_flags=shared_flags,
    )
