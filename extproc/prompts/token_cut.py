"""Cut a prompt's tokens as vLLM 0.32 does for `truncate_prompt_tokens` (vllm/renderers/params.py).

Called by the tokenizer. Two ways, and they differ: with a `truncation_side` in the request vLLM slices the finished
tokens; without one the Hugging Face tokenizer cuts the text's tokens and puts BOS and EOS around what is left.
"""

from typing import NamedTuple

from extproc.requests.request import Truncation, TruncationSide

TOKEN_BYTES = 4


class Frame(NamedTuple):
    """How many special tokens the tokenizer puts around a text."""

    before: int
    after: int


NO_FRAME = Frame(0, 0)


def kept_tokens(truncation: Truncation, *, max_model_len: int | None) -> int | None:
    """Return the longest prompt that is left whole; None if that is the context length, which is not known."""
    if truncation.tokens >= 0:
        return truncation.tokens
    return None if max_model_len is None else max(0, max_model_len - truncation.held_back)


def cut_tokens(tokens: bytes, *, keep: int, side: TruncationSide, frame: Frame = NO_FRAME) -> bytes:
    """Return at most `keep` tokens (little-endian uint32), the special tokens of `frame` among them whatever is cut.

    Raise ValueError where the frame alone is longer: vLLM answers such a request with an error.
    """
    length = len(tokens) // TOKEN_BYTES
    if length <= keep:
        return tokens
    if keep == 0:
        return b""
    inner = keep - frame.before - frame.after
    if inner < 0:
        raise ValueError(f"{keep} tokens leave no room beside {frame.before + frame.after} special tokens")
    end = length - frame.after
    start = end - inner if side is TruncationSide.LEFT else frame.before
    middle = tokens[start * TOKEN_BYTES : (start + inner) * TOKEN_BYTES]
    return tokens[: frame.before * TOKEN_BYTES] + middle + tokens[end * TOKEN_BYTES :]
