"""A pod without --enable-scale-out refuses to render, in vLLM's words, and does everything else."""

import aiohttp

from podsim.core.scheduler import EngineSettings
from podsim.model_folder import TINY_MODEL, load_model_folder
from podsim.pod import PodSettings
from podsim.publisher import PublisherSettings
from podsim.server import running_pods

ENGINE = EngineSettings(total_blocks=200, prefill_tokens_per_second=1e6, inter_token_seconds=0.001)
# vLLM 0.32, entrypoints/scale_out/factories.py
REFUSAL = {
    "error": {
        "message": "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable them.",
        "type": "PermissionDeniedError",
        "param": None,
        "code": 403,
    }
}


async def test_render_is_refused_and_completions_are_not() -> None:
    settings = PodSettings(max_model_len=2048, scale_out=False, engine=ENGINE)
    body = {"prompt": "import os", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    answers = {}
    async with (
        running_pods(settings, folder=load_model_folder(TINY_MODEL), publisher=PublisherSettings(host="127.0.0.1")) as [
            pod
        ],
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10)) as http,
    ):
        for path in ("/v1/chat/completions/render", "/v1/completions/render", "/v1/completions"):
            async with http.post(f"{pod.base_url}{path}", json=body) as response:
                answers[path] = (response.status, await response.json())

    assert answers.pop("/v1/completions")[0] == 200
    assert set(answers) == {"/v1/chat/completions/render", "/v1/completions/render"}
    assert all(answer == (403, REFUSAL) for answer in answers.values())
