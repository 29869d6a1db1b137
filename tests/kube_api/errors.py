"""What the server refuses, as the Status documents and words of the real one."""

from collections.abc import Sequence
from typing import Any

Document = dict[str, Any]  # JSON as the API speaks it


class ApiError(Exception):
    """A request that is refused: becomes a `Status` with this code, reason and message."""

    def __init__(self, code: int, reason: str, message: str, details: Document | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.message = message
        self.details = details

    def status(self) -> Document:
        document: Document = {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": self.message,
            "reason": self.reason,
        }
        if self.details:
            document["details"] = self.details
        return {**document, "code": self.code}


def qualified(plural: str, group: str) -> str:
    return f"{plural}.{group}" if group else plural


def _details(group: str, plural: str, name: str) -> Document:
    return {"name": name, **({"group": group} if group else {}), "kind": plural}


def not_found(group: str, plural: str, name: str) -> ApiError:
    return ApiError(404, "NotFound", f'{qualified(plural, group)} "{name}" not found', _details(group, plural, name))


class NoSuchPathError(Exception):
    """Nobody serves this: 404 in plain text, without a Status."""


def already_exists(group: str, plural: str, name: str) -> ApiError:
    text = f'{qualified(plural, group)} "{name}" already exists'
    return ApiError(409, "AlreadyExists", text, _details(group, plural, name))


def conflict(group: str, plural: str, name: str, why: str = "") -> ApiError:
    why = why or "the object has been modified; please apply your changes to the latest version and try again"
    text = f'Operation cannot be fulfilled on {qualified(plural, group)} "{name}": {why}'
    return ApiError(409, "Conflict", text, _details(group, plural, name))


def forbidden(group: str, plural: str, name: str, why: str, causes: Sequence[Document]) -> ApiError:
    details = {**_details(group, plural, name), "causes": list(causes)}
    return ApiError(403, "Forbidden", f'{qualified(plural, group)} "{name}" is forbidden: {why}', details)


def bad_request(text: str) -> ApiError:
    return ApiError(400, "BadRequest", text)


def not_allowed() -> ApiError:
    text = "the server does not allow this method on the requested resource"
    return ApiError(405, "MethodNotAllowed", text, {})


def unsupported_media(accepted: Sequence[str]) -> ApiError:
    text = "the body of the request was in an unknown format - accepted media types include: " + ", ".join(accepted)
    return ApiError(415, "UnsupportedMediaType", text)


def expired(text: str) -> ApiError:
    return ApiError(410, "Expired", text)


class Cause(tuple[str, str, str]):
    """One wrong field: (path, reason such as FieldValueRequired, message without the path)."""

    __slots__ = ()

    def __new__(cls, path: str, reason: str, message: str) -> "Cause":
        return super().__new__(cls, (path, reason, message))


def invalid(group: str, kind: str, name: str, causes: Sequence[Cause]) -> ApiError:
    """422: all wrong fields at once, in the words of the real server."""
    lines = [f"{path}: {message}" for path, _, message in causes]
    text = lines[0] if len(lines) == 1 else f"[{', '.join(lines)}]"
    details = _details(group, kind, name)
    details["causes"] = [{"reason": reason, "message": message, "field": path} for path, reason, message in causes]
    return ApiError(422, "Invalid", f'{qualified(kind, group)} "{name}" is invalid: {text}', details)
