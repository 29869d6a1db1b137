"""Whether a chat template wants message contents as lists of parts or as text.

The chat template asks once, at start-up. vLLM 0.32 decides this by looking for a loop over a message's content in the
template's syntax tree; the same loops count here. Where vLLM's search gives up, contents are text.
"""

from collections.abc import Iterator

from jinja2 import nodes


def wants_parts(template: nodes.Template) -> bool:
    """True if the template iterates over a message's content: in a message loop, or in a macro that gets it."""
    message_lists = _message_lists(template)
    if message_lists is None:
        return False
    messages: set[str] = set()
    for loop in template.find_all(nodes.For):
        if _reads(loop.iter, message_lists):
            if not isinstance(loop.target, nodes.Name):
                return False
            messages.add(loop.target.name)
    in_macros: set[int] = set()
    for macro in template.find_all(nodes.Macro):
        loops = list(macro.find_all(nodes.For))
        in_macros.update(map(id, loops))
        parameters = set(_content_parameters(template, macro, messages))
        if any(isinstance(loop.iter, nodes.Name) and loop.iter.name in parameters for loop in loops):
            return True
    return any(
        isinstance(loop.target, nodes.Name)
        and (
            _reads_content(loop.iter, messages)
            or (id(loop) not in in_macros and isinstance(loop.iter, nodes.Name) and loop.iter.name == "content")
        )
        for loop in template.find_all(nodes.For)
    )


def _message_lists(template: nodes.Template) -> set[str] | None:
    """The names that stand for all or some messages; None if one is assigned to something that is no name."""
    names, assignments = {"messages"}, list(template.find_all(nodes.Assign))
    while True:
        found = [assignment.target for assignment in assignments if _reads(assignment.node, names)]
        if not all(isinstance(target, nodes.Name) for target in found):
            return None
        grown = names | {target.name for target in found if isinstance(target, nodes.Name)}
        if grown == names:
            return names
        names = grown


def _content_parameters(template: nodes.Template, macro: nodes.Macro, messages: set[str]) -> Iterator[str]:
    """The parameters of a macro that are given a message's content in some call."""
    names = [argument.name for argument in macro.args]
    for call in template.find_all(nodes.Call):
        if not (isinstance(call.node, nodes.Name) and call.node.name == macro.name):
            continue
        for name, argument in zip(names, call.args, strict=False):
            if _reads_content(argument, messages):
                yield name
        for keyword in call.kwargs:
            if isinstance(keyword, nodes.Keyword) and keyword.key in names and _reads_content(keyword.value, messages):
                yield keyword.key


def _reads(node: nodes.Node, names: set[str]) -> bool:
    """Whether an expression is one of `names`, perhaps filtered or sliced."""
    node = _unwrapped(node)
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name in names


def _reads_content(node: nodes.Node, messages: set[str]) -> bool:
    """Whether an expression is the content of one of `messages`, perhaps filtered or sliced."""
    node = _unwrapped(node)
    if isinstance(node, nodes.Getattr):
        return node.attr == "content" and _reads(node.node, messages)
    return (
        isinstance(node, nodes.Getitem)
        and isinstance(node.arg, nodes.Const)
        and node.arg.value == "content"
        and _reads(node.node, messages)
    )


def _unwrapped(node: nodes.Node) -> nodes.Node:
    while isinstance(node, nodes.Filter | nodes.Test | nodes.Getitem):
        sliced = isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
        if node.node is None or (isinstance(node, nodes.Getitem) and not sliced):
            break
        node = node.node
    return node
