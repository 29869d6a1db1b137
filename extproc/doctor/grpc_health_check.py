"""Asks a picker's gRPC port for its health, as Envoy and Kubernetes do. For the gatherers and `local.readiness`."""

import asyncio
import os


async def ask_health(address: str, *, timeout_seconds: float) -> str:
    """Return SERVING, NOT_SERVING, or why there is no answer. Never raises for what the other side does."""
    # Read once, when gRPC is loaded. `kvmesh up` forks children beside this; gRPC's handlers for that were seen to
    # crash a child before it became the program that it should be, and to harm our own connections. Ours need no gRPC.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    # here, because the picker imports the doctor for its start-up checks, which do not ask this
    import grpc  # noqa: PLC0415
    from grpc_health.v1 import health_pb2, health_pb2_grpc  # noqa: PLC0415

    try:
        # the library's own deadline does not bound everything
        async with asyncio.timeout(timeout_seconds + 1), grpc.aio.insecure_channel(address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout_seconds)
    except grpc.aio.AioRpcError as error:
        return f"{error.code().name}: {error.details()}"
    except TimeoutError:
        return f"no answer within {timeout_seconds:g} s"
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))
