"""The two servers of the gRPC port; a test that any client could make runs on both."""

import pytest

from extproc.ext_proc.grpc_server import Http2Transport
from extproc.ext_proc.grpcio_server import GrpcioTransport

on_both_servers = pytest.mark.parametrize("transport", [Http2Transport, GrpcioTransport], ids=["own", "grpcio"])
