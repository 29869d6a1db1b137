"""HTTP: takes a request apart, has it carried out, and answers in the form that the client accepts."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import yaml
from aiohttp import web

from tests.kube_api.applying import apply
from tests.kube_api.calls import Call, parse_call
from tests.kube_api.deleting import Deletion, delete, deletion_of
from tests.kube_api.discovery import discovery
from tests.kube_api.errors import ApiError, Document, NoSuchPathError, bad_request, not_allowed, unsupported_media
from tests.kube_api.listing import list_objects, selection
from tests.kube_api.patches import json_merge, json_patch, strategic_merge
from tests.kube_api.state import State
from tests.kube_api.watching import Watch, open_watch
from tests.kube_api.writing import Intent, in_version

APPLY = "application/apply-patch+yaml"
MERGE = "application/merge-patch+json"
STRATEGIC = "application/strategic-merge-patch+json"
OPERATIONS = "application/json-patch+json"
_REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"


async def handle(request: web.Request, state: State) -> web.StreamResponse:
    """Any request."""
    await state.faults.before()
    try:
        return await _answer(request, state)
    except NoSuchPathError:
        return web.Response(text="404 page not found\n", status=404)
    except ApiError as refused:
        retry = (refused.details or {}).get("retryAfterSeconds")
        return _json(refused.status(), refused.code, {"Retry-After": str(retry)} if retry else None)


async def _answer(request: web.Request, state: State) -> web.StreamResponse:
    user = state.access.user_of(request.headers.get("Authorization"), request.headers.get("Impersonate-User"))
    if request.path in {"/healthz", "/livez", "/readyz"}:
        return web.Response(text="ok")
    if request.path == _REVIEWS and request.method == "POST":
        return _json(_review(await _body(request), user, state), 201)
    found = discovery(request.path, state.registry)
    if found is not None:
        return _json(found)
    call = parse_call(request.method, request.path, dict(request.query), state.registry)
    state.requests.append((call.verb, call.resource.plural, request.path_qs, user))
    state.access.check(user, call)
    state.faults.check(call)
    if call.verb == "watch":
        return await _watch(request, call, state)
    return await _VERBS[call.verb](request, call, state)


def _json(document: Document, code: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(document), status=code, content_type="application/json", headers=headers
    )


async def _body(request: web.Request) -> Any:
    raw = await request.read()
    try:
        return yaml.safe_load(raw) if "yaml" in request.content_type else msgspec.json.decode(raw or b"null")
    except (yaml.YAMLError, msgspec.DecodeError) as problem:
        raise bad_request(f"unable to decode the body: {problem}") from None


async def _document(request: web.Request) -> Document:
    body = await _body(request)
    if not isinstance(body, dict):
        raise bad_request("the body must be an object")
    return body


def _intent(request: web.Request, call: Call) -> Intent:
    agent = request.headers.get("User-Agent", "unknown").partition("/")[0]
    return Intent(
        manager=call.query.get("fieldManager") or agent,
        dry_run="dryRun" in call.query,
        subresource=call.subresource,
        strict=call.query.get("fieldValidation") == "Strict",
    )


STATE = web.AppKey("state", State)


def _one(call: Call, document: Document, intent: Intent | None = None) -> web.Response:
    answer = _json(in_version(call.resource, document), 201 if call.verb == "create" else 200)
    for warning in intent.warnings if intent else ():
        answer.headers.add("Warning", f"299 - {json.dumps(warning)}")
    return answer


async def _get(_: web.Request, call: Call, state: State) -> web.StreamResponse:
    _check_subresource(call)
    return _one(call, state.writer.current(call.resource, call.at))


async def _list(_: web.Request, call: Call, state: State) -> web.StreamResponse:
    return _json(list_objects(call, state.store))


async def _create(request: web.Request, call: Call, state: State) -> web.StreamResponse:
    document = await _document(request)
    intent = _intent(request, call)
    return _one(call, state.writer.create(call.resource, call.namespace, document, intent), intent)


async def _update(request: web.Request, call: Call, state: State) -> web.StreamResponse:
    _check_subresource(call)
    document = await _document(request)
    intent = _intent(request, call)
    return _one(call, state.writer.update(call.resource, call.at, document, intent), intent)


async def _patch(request: web.Request, call: Call, state: State) -> web.StreamResponse:
    _check_subresource(call)
    body, intent = await _body(request), _intent(request, call)
    if request.content_type == APPLY:
        if not call.query.get("fieldManager"):
            raise bad_request(
                'PatchOptions.meta.k8s.io "" is invalid: fieldManager: Required value: is required for apply patch'
            )
        existed = state.store.get(call.resource.key, call.at) is not None
        applied = apply(state.writer, call.resource, call.at, body, intent, force=call.flag("force"))
        answer = _one(call, applied)
        answer.set_status(200 if existed else 201)
        return answer
    old = in_version(call.resource, state.writer.current(call.resource, call.at))
    new = _patched(request.content_type, call, old, body)
    if not isinstance(new, dict):
        raise bad_request("the patch makes something else of the object than an object")
    return _one(call, state.writer.update(call.resource, call.at, new, intent), intent)


def _patched(media: str, call: Call, old: Document, body: Any) -> Any:
    if media == MERGE:
        return json_merge(old, body)
    if media == OPERATIONS:
        return json_patch(old, body)
    if media == STRATEGIC and not call.resource.custom:
        return strategic_merge(old, body)
    raise unsupported_media(
        [OPERATIONS, MERGE, APPLY] if call.resource.custom else [OPERATIONS, MERGE, STRATEGIC, APPLY]
    )


async def _delete(request: web.Request, call: Call, state: State) -> web.StreamResponse:
    options = await _body(request) if request.body_exists else None
    how = deletion_of(options if isinstance(options, dict) else {}, dict(call.query))
    last = delete(state.writer, call.resource, call.at, how)
    if state.store.get(call.resource.key, call.at) is not None:
        return _json(in_version(call.resource, last))
    details = {"name": call.name, "kind": call.resource.plural, "uid": last["metadata"]["uid"]}
    if call.resource.group:
        details["group"] = call.resource.group
    return _json({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "details": details})


async def _delete_collection(request: web.Request, call: Call, state: State) -> web.StreamResponse:
    holds = selection(call)
    whole = list_objects(call, state.store)
    for at, document in list(state.store.objects(call.resource.key).items()):
        if holds(document):
            delete(state.writer, call.resource, at, Deletion())
    return _json(whole)


def _check_subresource(call: Call) -> None:
    if call.subresource not in ({"", "status"} if call.resource.status else {""}):
        raise not_allowed()


def _review(review: Document, user: str, state: State) -> Document:
    asked = review["spec"].get("resourceAttributes") or {}
    allowed = state.access.may(
        user,
        asked.get("verb", ""),
        asked.get("group", ""),
        asked.get("resource", ""),
        asked.get("subresource", ""),
        asked.get("namespace", ""),
        asked.get("name", ""),
    )
    return {**review, "status": {"allowed": allowed}}


_VERBS: dict[str, Callable[[web.Request, Call, State], Awaitable[web.StreamResponse]]] = {
    "get": _get,
    "list": _list,
    "create": _create,
    "update": _update,
    "patch": _patch,
    "delete": _delete,
    "deletecollection": _delete_collection,
}


async def _watch(request: web.Request, call: Call, state: State) -> web.StreamResponse:
    watch = open_watch(call, state.store)
    response = web.StreamResponse(headers={"Content-Type": "application/json"})
    response.enable_chunked_encoding()
    await response.prepare(request)
    state.watches.append(watch)
    try:
        await _stream(response, call, watch, state)
    except ConnectionError:
        pass  # the client has gone
    finally:
        state.watches.remove(watch)
    return response


async def _stream(response: web.StreamResponse, call: Call, watch: Watch, state: State) -> None:
    """Send what happens until the time that the client gave is over, or it must list again."""
    loop = asyncio.get_running_loop()
    end = loop.time() + float(call.query.get("timeoutSeconds") or state.watch_seconds)
    next_bookmark = loop.time() + state.bookmark_seconds
    served = state.registry.find(call.resource.group, call.resource.version, call.resource.plural)
    while not watch.ended and loop.time() < end:
        if state.registry.find(call.resource.group, call.resource.version, call.resource.plural) is not served:
            return  # the definition went or changed: the client lists again
        waiter = state.store.waiter(call.resource.key)
        if watch.bookmarks and loop.time() >= next_bookmark:
            watch.bookmark_asked, next_bookmark = True, loop.time() + state.bookmark_seconds
        await state.faults.moving()
        events = watch.take(state.store)
        lines = [msgspec.json.encode(event) + b"\n" for event in events]
        if lines:
            await response.write(b"".join(lines))
        until = min(end, next_bookmark) if watch.bookmarks else end
        await asyncio.wait({waiter}, timeout=max(0.0, until - loop.time()) if not watch.ended else 0)
        waiter.cancel()
