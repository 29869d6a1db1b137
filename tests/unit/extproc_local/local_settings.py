"""Settings of `kvmesh up` as the flags' defaults give them, for tests that plan or report."""

from pathlib import Path

from extproc.local.body_delivery import BodyDelivery
from extproc.local.envoy_config import SocketAddress
from extproc.local.stack import StackSettings


def settings(
    *,
    endpoints: tuple[SocketAddress, ...] = (),
    model: str | None = "tiny",
    tokenizer: Path | None = Path("/tok"),
    event_sources: str | None = None,
    log_flags: tuple[str, ...] = (),
) -> StackSettings:
    return StackSettings(
        simulated_pods=2,
        endpoints=endpoints,
        model=model,
        tokenizer_folder=tokenizer,
        redis=None,
        envoy_port=10000,
        envoy_admin_port=9901,
        grpc_port=9002,
        admin_port=9090,
        indexer_admin_port=9091,
        sim_port=8101,
        body_delivery=BodyDelivery.DUPLEX,
        event_sources=event_sources,
        log_flags=log_flags,
    )
