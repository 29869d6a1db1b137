"""Forks vLLM servers from one process that has imported vLLM; runs in the vLLM environment.

An import takes some 12 s of CPU, and an ordinary start needs two: for the API server and for its engine, which vLLM
spawns on a CPU and forks on a GPU. Standard input is a socket. Each message on it is one server
{"arguments": [...], "environment": {...}} with the descriptor of its log; the answer is its pid.
"""

import ctypes
import gc
import importlib
import json
import multiprocessing.context
import os
import signal
import socket
import sys
from typing import Any

PR_SET_PDEATHSIG = 1  # linux/prctl.h
LARGEST_MESSAGE = 1 << 20
PRELOADED = ("entrypoints.launchers.api_server.entry", "v1.engine.async_llm", "v1.engine.core", "v1.worker.cpu_worker")


def main() -> None:
    serve, *_ = [importlib.import_module(f"vllm.{name}") for name in PRELOADED]
    contexts = vars(multiprocessing.context)["_concrete_contexts"]
    contexts["spawn"] = contexts["fork"]
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the servers
    with socket.socket(fileno=0) as requests:
        while True:
            message, descriptors, *_ = socket.recv_fds(requests, LARGEST_MESSAGE, 1)
            if not message:
                return
            pid = os.fork()
            if pid == 0:
                requests.close()
                become_server(json.loads(message), log=descriptors[0])
                serve.main()
                return
            os.close(descriptors[0])
            requests.send(json.dumps(pid).encode())


def become_server(asked: dict[str, Any], *, log: int) -> None:
    """Take over the session, output, environment and arguments of the server."""
    os.setsid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.environ.clear()
    os.environ.update(asked["environment"])
    sys.argv = ["vllm", *asked["arguments"]]


if __name__ == "__main__":
    main()
