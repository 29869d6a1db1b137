"""What clients that do not mean well send over HTTP/1.1."""

from tests.attack.target import Target


def upload_head(target: Target, size: int, *, path: str = "/v1/chat/completions") -> bytes:
    """Return the head of a POST whose body is to have `size` bytes."""
    return f"POST {path} HTTP/1.1\r\nhost: {target.gateway}\r\ncontent-length: {size}\r\n\r\n".encode()
