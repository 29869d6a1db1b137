"""A simulated pod whose /render uses the quick tokenizer: `python -m bench.routing.quick_pod FLAGS OF podsim`.

podsim renders with the reference tokenizer, because it is a witness; that takes 10 to 60 ms a prompt of a core which
the routers share with it here, and while it lasts the engine stands still. Real pods tokenize beside the engine.

It also can turn bad (`turning_pod`).
"""

from bench.routing.turning_pod import TurningApi
from podsim import server
from podsim.cli import app
from podsim.model_folder import ModelFolder

if __name__ == "__main__":
    ModelFolder.encode_by_reference = ModelFolder.encode  # type: ignore[method-assign]
    server.PodApi = TurningApi  # type: ignore[attr-defined]
    app(prog_name="podsim")
