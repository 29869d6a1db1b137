"""Read bodies of prefill and decode legs with SGLang's own code; runs in the SGLang environment.

Called by `test_transfer_forms.py` as a subprocess. Reads [[path, body]] from standard input, and writes what SGLang's
requests have of them, the headers that go before the body's fields, and the bootstrap server's usual port.
"""

import inspect
import json
import sys
from typing import Any

from sglang.srt.arg_groups.fields import disagg  # type: ignore[import-not-found]
from sglang.srt.entrypoints.anthropic.protocol import AnthropicMessagesRequest  # type: ignore[import-not-found]
from sglang.srt.entrypoints.openai.protocol import (  # type: ignore[import-not-found]
    ChatCompletionRequest,
    CompletionRequest,
    PDRoutingFields,
    ResponsesRequest,
)
from sglang.srt.entrypoints.request_headers import _HEADER_OVERRIDES  # type: ignore[import-not-found]

FORMS = {
    "/v1/chat/completions": ChatCompletionRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": AnthropicMessagesRequest,
}


def main() -> None:
    """Answer."""
    read: list[dict[str, Any]] = []
    for path, body in json.load(sys.stdin):
        request = FORMS[path].model_validate(body)
        fields = {name: getattr(request, name) for name in PDRoutingFields.model_fields}
        read.append(
            {"stream": bool(request.stream), **{name: value for name, value in fields.items() if value is not None}}
        )
    headers = [header for header, (name, _) in _HEADER_OVERRIDES.items() if name in PDRoutingFields.model_fields]
    lines = inspect.getsource(disagg).splitlines()
    at = next(number for number, line in enumerate(lines) if "Bootstrap server port on the prefill server" in line)
    answer = {"read": read, "headers": headers, "port": lines[at + 1].strip(" ]=")}
    sys.stdout.write("\n" + json.dumps(answer))


if __name__ == "__main__":
    main()
