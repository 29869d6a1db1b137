"""Which content a chat template expects: a string, or OpenAI's list of parts (vLLM's `auto` mode).

Called once per template by `chat_template`. A template takes parts when it loops over a message's content,
directly, through a variable, or in a macro that is given the content. It reads the syntax tree, renders nothing.
"""

from collections.abc import Iterator

from jinja2 import nodes

from extproc.requests.chat_messages import ContentFormat


class _NotUnderstoodError(Exception):
    """The tree has a form that vLLM's detection gives up on; it then takes strings."""


def content_format(tree: nodes.Template) -> ContentFormat:
    """Return "openai" for a template that loops over the parts of a message's content, else "string"."""
    try:
        return "openai" if any(_content_loops(tree)) else "string"
    except _NotUnderstoodError:
        return "string"


def _content_loops(tree: nodes.Template) -> Iterator[nodes.For]:
    messages = list(_message_names(tree))
    parameters = _macro_parameters(tree, messages)
    for loop in tree.find_all(nodes.For):
        in_macro = id(loop) in parameters
        names = parameters.get(id(loop), set()) if in_macro else {"content"}
        is_parameter = isinstance(loop.iter, nodes.Name) and loop.iter.name in names
        if is_parameter or any(_is_derived(loop.iter, name, "content") for name in messages):
            _target_name(loop.target)
            yield loop


def _message_names(tree: nodes.Template) -> Iterator[str]:
    """Yield the names that stand for one message: the targets of loops over `messages` or a copy of it."""
    lists = list(_aliases(tree, "messages"))
    for loop in tree.find_all(nodes.For):
        if any(_is_derived(loop.iter, name) for name in lists):
            yield _target_name(loop.target)


def _aliases(tree: nodes.Template, name: str) -> Iterator[str]:
    """Yield `name` and every variable that is assigned from it, possibly sliced or filtered."""
    seen, queue = {name}, [name]
    while queue:
        current = queue.pop(0)
        yield current
        for assignment in tree.find_all(nodes.Assign):
            if _is_derived(assignment.node, current) and (target := _target_name(assignment.target)) not in seen:
                seen.add(target)
                queue.append(target)


def _macro_parameters(tree: nodes.Template, messages: list[str]) -> dict[int, set[str]]:
    """Return, for each loop inside a macro (by identity), the macro's parameters that receive a content."""
    by_loop: dict[int, set[str]] = {}
    calls = [call for call in tree.find_all(nodes.Call) if isinstance(call.node, nodes.Name)]
    for macro in tree.find_all(nodes.Macro):
        declared = [argument.name for argument in macro.args]
        given: set[str] = set()
        for call in calls:
            if isinstance(call.node, nodes.Name) and call.node.name == macro.name:
                named = [(keyword.key, keyword.value) for keyword in call.kwargs if keyword.key in declared]
                for parameter, value in [*zip(declared, call.args, strict=False), *named]:
                    if any(_is_derived(value, message, "content") for message in messages):
                        given.add(parameter)
        for loop in macro.find_all(nodes.For):
            by_loop[id(loop)] = given
    return by_loop


def _is_derived(node: nodes.Node | None, name: str, key: str | None = None) -> bool:
    """Whether `node` is the variable (or its member `key`), maybe behind filters, tests and slices."""
    while isinstance(node, nodes.Filter | nodes.Test) or (
        isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
    ):
        node = node.node
    if key is None:
        return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name
    if isinstance(node, nodes.Getattr):
        return node.attr == key and _is_derived_name(node.node, name)
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const):
        return bool(node.arg.value == key) and _is_derived_name(node.node, name)
    return False


def _is_derived_name(node: nodes.Node, name: str) -> bool:
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name


def _target_name(target: nodes.Node) -> str:
    if not isinstance(target, nodes.Name):
        raise _NotUnderstoodError
    return target.name
