"""How long a step of a model on a real GPU takes, by what is in it: `python bench/gpu_steps.py FILE`, by hand.

Needs PyTorch and a GPU with 80 GB, which are no dependencies of kvmesh. The model has the shapes of Llama 3 8B and
random weights: time depends on shapes only. Attention is PyTorch's own, and each step is one CUDA graph, as in vLLM. It
writes the times and their least-squares fits:

    decode step  = a + b * sequences + c * tokens in their caches
    prompt chunk = a + b * tokens + c * tokens * (tokens before it + half of its own)
"""

import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch  # type: ignore[import-not-found]
import torch.nn.functional as nn  # type: ignore[import-not-found]
from torch.nn.attention.bias import causal_lower_right  # type: ignore[import-not-found]

LAYERS, WIDTH, HEADS, KV_HEADS, HEAD, FFN, VOCABULARY = 32, 4096, 32, 8, 128, 14336, 128256
KV_BYTES = 2 * LAYERS * KV_HEADS * HEAD * 2  # of one token, bfloat16
KV_LIMIT = 44e9
SEQUENCES = (1, 4, 8, 16, 32, 64, 128, 256)
CONTEXTS = (128, 512, 1024, 2048, 4096, 8192, 16384)
CHUNKS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
BEFORE = (0, 2048, 8192, 16384)
MIXED_CHUNKS = (0, 128, 512, 1024, 2048)

Cache = list[tuple[torch.Tensor, torch.Tensor]]


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * 0.02


class Model:
    """Weights of all layers; a step is `of` on tokens' hidden states."""

    def __init__(self) -> None:
        self.layers = [
            (
                random(WIDTH),
                random((HEADS + 2 * KV_HEADS) * HEAD, WIDTH),
                random(WIDTH, HEADS * HEAD),
                random(WIDTH),
                random(2 * FFN, WIDTH),
                random(WIDTH, FFN),
            )
            for _ in range(LAYERS)
        ]
        self.output = random(VOCABULARY, WIDTH)

    def of(self, hidden: torch.Tensor, decoded: int, decode: Cache, before: Cache) -> torch.Tensor:
        """Compute `decoded` sequences' next tokens and, in the other rows, one prompt's chunk."""
        for index, (norm, qkv, out, second_norm, gate_up, down) in enumerate(self.layers):
            q, k, v = nn.linear(nn.rms_norm(hidden, (WIDTH,), norm), qkv).split(
                [HEADS * HEAD, KV_HEADS * HEAD, KV_HEADS * HEAD], dim=1
            )
            parts = []
            if decoded:
                keys, values = decode[index]
                grouped = q[:decoded].reshape(decoded, KV_HEADS, HEADS // KV_HEADS, HEAD)
                parts.append(nn.scaled_dot_product_attention(grouped, keys, values).reshape(decoded, -1))
            if (rows := hidden.shape[0] - decoded) > 0:
                keys, values = before[index]
                past = keys.shape[2]
                keys = torch.cat([keys, k[decoded:].reshape(1, rows, KV_HEADS, HEAD).transpose(1, 2)], dim=2)
                values = torch.cat([values, v[decoded:].reshape(1, rows, KV_HEADS, HEAD).transpose(1, 2)], dim=2)
                query = q[decoded:].reshape(1, rows, HEADS, HEAD).transpose(1, 2)
                attended = nn.scaled_dot_product_attention(
                    query, keys, values, attn_mask=causal_lower_right(rows, past + rows), enable_gqa=True
                )
                parts.append(attended.transpose(1, 2).reshape(rows, -1))
            hidden = hidden + nn.linear(torch.cat(parts), out)
            gate, up = nn.linear(nn.rms_norm(hidden, (WIDTH,), second_norm), gate_up).chunk(2, dim=1)
            hidden = hidden + nn.linear(nn.silu(gate) * up, down)
        last = hidden[: decoded + 1] if hidden.shape[0] > decoded else hidden[:decoded]
        return nn.linear(last, self.output).argmax(dim=1)


def cache_of(sequences: int, tokens: int) -> Cache:
    shape = (sequences, KV_HEADS, tokens, HEAD)
    return [(random(*shape), random(*shape)) for _ in range(LAYERS)]


def milliseconds(step: Callable[[], object], rounds: int = 15) -> float:
    """Return the median time of a step, played from a CUDA graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), torch.no_grad():
        for _ in range(2):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        step()
    times = []
    for _ in range(rounds):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return float(statistics.median(times))


def measured(model: Model, sequences: int, context: int, chunk: int, before: int) -> float:
    decode = cache_of(sequences, context) if sequences else []
    past = cache_of(1, before) if chunk else []
    hidden = random(sequences + chunk, WIDTH)
    return milliseconds(lambda: model.of(hidden, sequences, decode, past))


def fitted(rows: list[list[float]], times: list[float]) -> dict[str, object]:
    """Fit by least squares of relative errors, so that short steps count as much as long ones."""
    weight = 1 / torch.tensor(times, dtype=torch.float64)
    matrix = torch.tensor(rows, dtype=torch.float64) * weight[:, None]
    found = torch.linalg.lstsq(matrix, torch.ones(len(times), 1, dtype=torch.float64)).solution[:, 0]
    errors = (torch.tensor(rows, dtype=torch.float64) @ found) * weight - 1
    return {
        "coefficients_ms": found.tolist(),
        "mean_error": errors.abs().mean().item(),
        "largest_error": errors.abs().max().item(),
    }


def main(path: str) -> None:
    torch.manual_seed(1)
    model = Model()
    decode = []
    for context in CONTEXTS:
        for sequences in SEQUENCES:
            if sequences * context * KV_BYTES <= KV_LIMIT:
                decode.append((sequences, context, measured(model, sequences, context, 0, 0)))
    prompts = [(chunk, before, measured(model, 0, 0, chunk, before)) for before in BEFORE for chunk in CHUNKS]
    mixed = [
        (sequences, context, chunk, measured(model, sequences, context, chunk, 0))
        for sequences, context in ((16, 2048), (64, 2048), (128, 1024))
        for chunk in MIXED_CHUNKS
    ]
    result = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "model": "shapes of Llama 3 8B, bfloat16, random weights",
        "decode": [{"sequences": s, "context": c, "ms": t} for s, c, t in decode],
        "prompt": [{"tokens": n, "before": m, "ms": t} for n, m, t in prompts],
        "mixed": [{"sequences": s, "context": c, "tokens": n, "ms": t} for s, c, n, t in mixed],
        "decode_fit": fitted([[1, s, s * c] for s, c, _ in decode], [t for *_, t in decode]),
        "prompt_fit": fitted([[1, n, n * (m + n / 2)] for n, m, _ in prompts], [t for *_, t in prompts]),
    }
    Path(path).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({"decode": result["decode_fit"], "prompt": result["prompt_fit"]}, indent=1))


if __name__ == "__main__":
    main(sys.argv[1])
