"""Tokenize pairs of a query and a document with vLLM's own code; runs in the vLLM environment, without a server.

Called by `test_scoring_parity.py` as a subprocess. Reads JSON from standard input, [{"folder": a model's folder,
"template": source or null, "bodies": [rerank bodies]}], and writes for each the token ids of each body's pairs.
"""

import json
import os
import sys
from types import SimpleNamespace
from typing import Any

from transformers import AutoConfig, PreTrainedTokenizerFast
from vllm.config import ModelConfig  # type: ignore[import-not-found]
from vllm.entrypoints.pooling.scoring.io_processor import CrossEncoderIOProcessor  # type: ignore[import-not-found]
from vllm.entrypoints.pooling.scoring.protocol import RerankRequest  # type: ignore[import-not-found]
from vllm.model_executor.models.adapters import SequenceClassificationConfig  # type: ignore[import-not-found]


def processor(folder: str) -> Any:
    """Return vLLM's processor with the few settings that text needs."""
    config = AutoConfig.from_pretrained(folder)
    hugging = SimpleNamespace(
        hf_config=config, multimodal_config=None, max_model_len=4096, encoder_config={}, enable_prompt_embeds=False
    )
    SequenceClassificationConfig.verify_and_update_config(SimpleNamespace(model_config=hugging))
    made = object.__new__(CrossEncoderIOProcessor)
    made.tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    made.model_config = hugging
    made.model, made.supports_score_template = None, False
    made.use_sep_token = ModelConfig.use_sep_token.fget(hugging)
    return made


def pairs(made: Any, body: dict[str, Any], template: str | None) -> list[list[int]]:
    request = RerankRequest.model_validate(body)
    params = request.build_tok_params(made.model_config)
    found = []
    for document in request.documents:
        _, prompt = made.get_score_prompt(
            request.query,
            document,
            encode_kwargs=params.get_encode_kwargs(),
            chat_template=template,
            chat_template_kwargs=request.chat_template_kwargs,
        )
        params.apply_post_tokenization(made.tokenizer, prompt)
        found.append(list(prompt["prompt_token_ids"]))
    return found


def main() -> None:
    question = json.load(sys.stdin)
    answers = os.fdopen(os.dup(1), "w")  # vLLM logs to standard output
    os.dup2(2, 1)
    found = []
    for asked in question:
        made = processor(asked["folder"])
        found.append([pairs(made, body, asked["template"]) for body in asked["bodies"]])
    with answers:
        json.dump(found, answers)


if __name__ == "__main__":
    main()
