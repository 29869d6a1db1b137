"""What is not sent to a pod."""

import pytest

from kvmesh.pods.http_response import HttpResponseError
from kvmesh.pods.pod_http import PodHttp


@pytest.mark.parametrize("value", ["0\r\nx-evil: 1", "0\n", "0\r", "0\0", "\x7f"])
async def test_a_header_with_control_characters_is_not_sent(value: str) -> None:
    pod = PodHttp("127.0.0.1:1", connect_seconds=1.0)  # nothing listens: a request would end with an OSError
    with pytest.raises(HttpResponseError, match="the header x-rank has control characters"):
        await pod.post("/", b"{}", max_body_bytes=1, headers={"x-other": "a\tb", "x-rank": value})
