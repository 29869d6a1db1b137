"""What holds for every test: a limit for each, and no handlers of gRPC's in forked children."""

import os

# Read when gRPC is loaded, so here. Tests fork from a process that gRPC's threads work in, and its handlers for that
# were seen to crash the child before it became another program, and to close the parent's connections.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"

pytest_plugins = ["tests.hang_guard"]
