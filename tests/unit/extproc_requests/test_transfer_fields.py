"""No body keeps the fields by which a pod would fetch from elsewhere, however they are written; all else stays."""

import gzip
import json
import zlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.requests.client_body import TRANSFER_FIELDS, ClientBody, FieldsNotRemovedError, without_transfer_fields
from extproc.requests.json_edit import MAX_FIELDS, MAX_INNER

INNER = ("vllm_xargs", "extra_args", "sampling_params")
LIMIT = 1 << 20


@pytest.mark.parametrize("name", sorted(TRANSFER_FIELDS))
@pytest.mark.parametrize("value", ['""', "null", "5", '{"remote_host": "a", "b": [1, "}"]}'])
@pytest.mark.parametrize("escaped", [False, True])
def test_each_field_goes_with_its_comma(name: str, value: str, escaped: bool) -> None:
    written = name.replace("_", "\\u005F", 1) if escaped else name
    for raw, left in (
        ('{"@": #}', "{}"),
        (' { "a" : 1 , "@" : # }\n', ' { "a" : 1 }\n'),
        ('{"@":#, "a":1}', '{"a":1}'),
        ('{"a":1, "@":# ,\n "b":2}', '{"a":1, "b":2}'),
        ('{"@":1,"a":1,"@":#,"@":2}', '{"a":1}'),
        ('{"n":1.10,"t":NaN,"@":#,"t":Infinity}', '{"n":1.10,"t":NaN,"t":Infinity}'),
        ('\ufeff{"@":#}', "\ufeff{}"),
        ('{"vllm_xargs": {"@": #, "mode": "full"}}', '{"vllm_xargs": {"mode": "full"}}'),
        ('{"vllm_xargs":{"@":#},"vllm_xargs":{}}', '{"vllm_xargs":{},"vllm_xargs":{}}'),
        ('{"extra_args": {"@": #}}', '{"extra_args": {}}'),
        ('{"sampling_params":{"extra_args":{"@":#},"@":#,"n":1}}', '{"sampling_params":{"extra_args":{},"n":1}}'),
        ('{"sampling_params":{"vllm_xargs":{"a":1,"@":#}}}', '{"sampling_params":{"vllm_xargs":{"a":1}}}'),
    ):
        body = raw.replace("@", written).replace("#", value).encode()
        assert without_transfer_fields(body) == left.encode()


@pytest.mark.parametrize("coding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"])
def test_other_encodings_that_pods_read_become_utf_8_where_something_goes(coding: str) -> None:
    text = '{"a": "Ω😀", "vllm_xargs": {"kv_transfer_params": ""}}'
    assert without_transfer_fields(text.encode(coding)) == '{"a": "Ω😀", "vllm_xargs": {}}'.encode()
    harmless = '{"a": "Ω😀"}'.encode(coding)
    assert without_transfer_fields(harmless) is harmless


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b'{"messages":[{"content":"what is \\"kv_transfer_params\\": {} ?","kv_transfer_params":1}]}',
        b'{"prompt":"kv_transfer_params","input":{"kv_transfer_params":{}},"tools":[{"bootstrap_host":"a"}]}',
        b'{"prompt":"d\\u00e9j\\u00e0 \\u0041 \\\\u006bv_transfer_params"}',
        b'{"vllm_xargs":"kv_transfer_params","extra_args":["kv_transfer_params"],"sampling_params":null}',
        b'{"sampling_params":{"extra_args":{"vllm_xargs":{"kv_transfer_params":1}}}}',
        b'{"KV_TRANSFER_PARAMS":1,"kv_transfer_params ":1,"params":2}',
        b'--b\r\nname="kv_transfer_params"\r\n\r\n{}',
        b'["kv_transfer_params"]',
        b'{"kv_transfer_params":1}'.decode().encode("utf-16")[:-1],
    ],
)
def test_the_bytes_stay_where_there_is_nothing_to_take_out(body: bytes) -> None:
    assert without_transfer_fields(body) is body


_VALUES: Any = st.recursive(
    st.none() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(st.tuples(st.sampled_from(["a", *INNER, *TRANSFER_FIELDS]), inner), max_size=4).map(tuple),
    max_leaves=8,
)


def _written(value: Any) -> str:
    if not isinstance(value, tuple):
        return json.dumps(value)
    return "{" + ",".join(f"{json.dumps(name)}:{_written(inner)}" for name, inner in value) + "}"


def _left(value: Any, depth: int) -> Any:
    if not isinstance(value, tuple) or depth < 0:
        return value
    return tuple(
        (name, _left(inner, depth - 1 if name in INNER else -1)) for name, inner in value if name not in TRANSFER_FIELDS
    )


@given(_VALUES.filter(lambda value: isinstance(value, tuple)))
def test_any_object_with_any_duplicates_keeps_all_but_these_fields(value: Any) -> None:
    assert without_transfer_fields(_written(value).encode()) == _written(_left(value, 2)).encode()


@pytest.mark.parametrize(
    "body",
    [
        b'{"kv_transfer_params":1',
        b'{"kv_transfer_params":1}}',
        b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b',"kv_transfer_params":1}',
        b"{" + b",".join([b'"kv_transfer_params":1'] * (MAX_FIELDS + 1)) + b"}",
        b"{" + b",".join([b'"vllm_xargs":{"kv_transfer_params":1}'] * (MAX_INNER + 1)) + b"}",
        b'{"a":NaN,"b":[' + b"[]," * 110_000 + b'1],"kv_transfer_params":1}',
    ],
)
def test_what_cannot_be_searched_is_refused(body: bytes) -> None:
    with pytest.raises(FieldsNotRemovedError, match="no client may set"):
        without_transfer_fields(body)


@pytest.mark.parametrize(("coding", "pack"), [("gzip", gzip.compress), ("deflate", zlib.compress)])
def test_a_coded_body_is_unpacked_where_something_goes(coding: str, pack: Any) -> None:
    given_, harmless = b'{"kv_transfer_params":1,"a":2}', b'{"a":2}'
    body = ClientBody(pack(given_), content_encoding=coding, max_bytes=LIMIT)
    assert (body.plain(), body.cleaned) == (harmless, harmless)
    body = ClientBody(pack(harmless), content_encoding=coding, max_bytes=LIMIT)
    assert (body.plain(), body.cleaned) == (harmless, None)
