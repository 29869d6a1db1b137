"""Messages of Envoy's, written by the library and read as the product reads them."""

from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest

from extproc.ext_proc import answers as ext_proc
from extproc.ext_proc.messages import HeadersMessage, read_message


def read_headers(
    message: ProcessingRequest, *, further: frozenset[str] = ext_proc.FURTHER_HEADERS, of: str = "request_headers"
) -> HeadersMessage:
    """Read a message with headers of this kind, which may be empty."""
    getattr(message, of).SetInParent()
    read = read_message(message.SerializeToString(), ext_proc.wanted_headers(further))
    assert isinstance(read, HeadersMessage)
    return read


def read_response(message: ProcessingRequest) -> HeadersMessage:
    """Read a message with a response's headers."""
    return read_headers(message, of="response_headers")
