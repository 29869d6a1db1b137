"""Bounds on a chat template's time and memory, put into its code.

Loops spend units for their longest path before they run, macros at each call. Operators, filters and methods spend
before they run, for their arguments and their longest result. All other nodes take constant time. A name outside the
lists below is refused: its cost is unknown.
"""

from collections.abc import Iterable, Iterator, Mapping
from functools import reduce
from typing import Any, cast

from jinja2 import TemplateError, Undefined, nodes, pass_context
from jinja2.compiler import CodeGenerator
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.utils import _PassArg as PassedArgument
from jinja2.visitor import NodeTransformer

from extproc.prompts.template_units import MOST_BITS, NODE, NODES, SCALARS, LimitedContext, breach, loop


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


MOST_CHARACTERS, MOST_NODES = 1 << 17, 20_000  # the longest published template has 30,000 characters
MOST_TERMS = 4  # of a sum whose length is spent once it exists

_DEEP = _words(
    "tojson join sort unique dictsort min max sum string replace trim upper lower capitalize title indent format e "
    "escape safe wordcount center int float round"
)
_SHALLOW = frozenset(("list", "map", "select", "selectattr", "reject", "rejectattr", "reverse", "items"))
_CONSTANT = frozenset(("default", "d", "length", "count", "first", "last", "abs"))
_COMPARING_TESTS = _words("in eq equalto == ne != lt lessthan < gt greaterthan > le <= ge >= lower upper")
_CONSTANT_TESTS = _words(
    "defined undefined none string mapping iterable sequence number boolean true false integer float callable sameas "
    "odd even divisibleby filter test"
)
_GLOBALS = frozenset(("range", "namespace", "dict"))
_OF_LISTS = frozenset(("index", "count"))
_OF_STRINGS = _words(
    "split rsplit splitlines partition rpartition strip lstrip rstrip startswith endswith find rfind index rindex "
    "count lower upper title capitalize casefold swapcase replace join removeprefix removesuffix center ljust rjust "
    "zfill isdigit isdecimal isnumeric isalpha isalnum isspace isupper islower istitle isidentifier isascii"
)
_METHODS: Mapping[str, frozenset[str]] = {
    "str": _OF_STRINGS,
    "Markup": _OF_STRINGS,
    "list": _OF_LISTS,
    "tuple": _OF_LISTS,
    "dict": frozenset(("get", "items", "keys", "values")),
}
_OWN_TYPES = (LoopContext, Namespace, Macro, Undefined)
_SCOPES = ("_loop_vars", "_block_vars")  # Jinja's own arguments
_SLOW: Mapping[type[nodes.Node], int] = {nodes.Call: 8, nodes.Filter: 4, nodes.Test: 4}  # as many other nodes
_UNBOUNDED = (
    *(nodes.Block, nodes.Extends, nodes.Include, nodes.Import, nodes.FromImport),
    *(nodes.EvalContextModifier, nodes.ScopedEvalContextModifier),
)


class _Limits(NodeTransformer):
    """Puts the spending of units into a template's tree."""

    buffers = 0

    # ruff: noqa: N802, N815 - Jinja's names
    def visit_For(self, node: nodes.For) -> nodes.Node:
        if node.recursive:
            raise TemplateError("recursive loops are not supported")
        units = NODE * (1 + _longest(node.body) + _longest([node.test] if node.test else []))
        self.generic_visit(node)
        node.iter = _filter("loop", node.iter, nodes.Const(units))
        return node

    def visit_Macro(self, node: nodes.Macro | nodes.CallBlock) -> nodes.Node:
        units = NODE * (8 + _longest(node.body) + _longest(node.defaults))
        self.visit_buffer(node)
        node.body.insert(0, nodes.ExprStmt(_filter("spend", nodes.Const(None), nodes.Const(units))))
        return node

    visit_CallBlock = visit_Macro

    def visit_buffer(self, node: nodes.Node) -> nodes.Node:
        """Visit a node that keeps its text to its end."""
        self.buffers += 1
        self.generic_visit(node)
        self.buffers -= 1
        return node

    visit_AssignBlock = visit_FilterBlock = visit_buffer

    def visit_Output(self, node: nodes.Output) -> nodes.Node:
        for index, child in enumerate(node.nodes):
            terms = _terms(child)
            if self.buffers or len(terms) > MOST_TERMS:
                node.nodes[index] = self.visit(child)
            else:  # spent by `concatenated`
                node.nodes[index] = reduce(nodes.Add, map(self.visit, terms))
        return node

    def visit_Add(self, node: nodes.Add) -> nodes.Node:
        left, right = self.visit(node.left), self.visit(node.right)
        runs = isinstance(right, nodes.Call) or next(right.find_all((nodes.Call, nodes.Filter)), None)
        if isinstance(left, nodes.Filter) and left.name == "limits add" and not runs:
            left.args.append(right)
            return left
        return _filter("add", left, right)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        return _filter("~", *[self.visit(each) for each in node.nodes])

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        first, last = node.expr, node.ops[-1]
        is_in = last.op in ("in", "notin")
        if len(node.ops) == 1 and (_is_short(last.expr) or (_is_short(first) and not is_in)):
            return node
        if not _is_short(first):
            node.expr = _filter("all", first)
        for operand in node.ops:
            operand.expr = _filter("read" if _is_short(first) else "all", operand.expr)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            return _filter("part", node)
        if not isinstance(node.arg, nodes.Const):
            node.arg = _filter("key", node.arg)
        return node

    def visit_Dict(self, node: nodes.Dict | nodes.List | nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        for pair in node.items if isinstance(node, nodes.Dict) else ():
            if not _is_short(pair.key):
                pair.key = _filter("all", pair.key)
        return node if _is_short(node) or getattr(node, "ctx", "load") != "load" else _filter("made", node)

    visit_List = visit_Tuple = visit_Dict


def _filter(name: str, value: nodes.Node, *args: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(
        cast("nodes.Expr", value), f"limits {name}", list(args), [], None, None, lineno=value.lineno or 1
    )


def _terms(node: nodes.Node) -> list[nodes.Expr]:
    """Return the terms of a sum in their order."""
    return [*_terms(node.left), node.right] if isinstance(node, nodes.Add) else [cast("nodes.Expr", node)]


def _is_text(node: nodes.Node) -> bool:
    """Tell whether the node's value, if it has any, is certainly a text."""
    if isinstance(node, nodes.Filter) and node.name == "limits add":
        return any(isinstance(term, nodes.Const) and isinstance(term.value, str) for term in (node.node, *node.args))
    return any(isinstance(term, nodes.Const) and isinstance(term.value, str) for term in _terms(node))


def _is_short(node: nodes.Node) -> bool:
    """Tell whether comparing any value with this one takes constant time."""
    if isinstance(node, nodes.List | nodes.Tuple):
        return all(isinstance(item, nodes.Const) for item in node.items)
    return isinstance(node, nodes.Const | nodes.Compare | nodes.Test | nodes.Not)


def _longest(body: Iterable[nodes.Node]) -> int:
    """Return the cost in nodes of the longest path, without the bodies of loops and macros: they are counted."""
    return sum(map(_path, body))


def _path(node: nodes.Node) -> int:
    if isinstance(node, nodes.If):
        branches = [node.body, node.else_, *[each.body for each in node.elif_]]
        return 1 + _longest([node.test, *[each.test for each in node.elif_]]) + max(map(_longest, branches))
    if isinstance(node, nodes.For):
        return 1 + _path(node.iter) + _longest(node.else_)
    own = _SLOW.get(type(node), 1)
    return own if isinstance(node, nodes.Macro) else own + _longest(node.iter_child_nodes())


class _Code(CodeGenerator):
    def write_commons(self) -> None:
        super().write_commons()
        self.writeline("str = context.text")
        self.writeline("concat = context.concatenated")

    def _output_child_pre(self, node: nodes.Expr, frame: Any, finalize: Any) -> None:
        if _is_text(node):
            self.write("(")
        else:
            super()._output_child_pre(node, frame, finalize)


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, for unread templates."""

    code_generator_class = _Code
    context_class = LimitedContext
    intercepted_binops = frozenset(("*", "**", "%"))

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.filters["sum"] = _sum
        kept = {name: _metered(name, self.filters[name]) for name in (*_DEEP, *_SHALLOW)}
        self.filters = kept | {name: self.filters[name] for name in _CONSTANT}
        self.filters |= {f"limits {name}": function for name, function in NODES.items()}
        tests = {name: _metered(name, self.tests[name]) for name in _COMPARING_TESTS}
        self.tests = tests | {name: self.tests[name] for name in _CONSTANT_TESTS}
        self.globals = {name: self.globals[name] for name in _GLOBALS}

    def set_filter(self, name: str, function: Any) -> None:
        """Add a filter that reads all of its value."""
        self.filters[name] = _metered(name, function)

    def limited(self, tree: nodes.Template) -> nodes.Template:
        """Return the tree of `parse` with its limits; raise TemplateError for a tree that cannot have them."""
        _Limits().visit(tree)
        tree.set_environment(self)
        return tree

    def parse(self, source: str, *args: Any) -> nodes.Template:
        """Parse a template; raise TemplateError for one too long, or with nodes whose cost is not known."""
        if len(source) > MOST_CHARACTERS:
            raise TemplateError(f"it is longer than {MOST_CHARACTERS} characters")
        tree = super().parse(source, *args)
        if sum(1 for _ in tree.find_all(nodes.Node)) > MOST_NODES:
            raise TemplateError(f"it has more than {MOST_NODES} nodes")
        names = {node.name for macro in tree.find_all(nodes.Macro) for node in macro.find_all(nodes.Name)}
        if next(tree.find_all(_UNBOUNDED), None) or names & {"varargs", "kwargs"}:
            raise TemplateError("blocks, imports, autoescape, varargs and kwargs are not supported")
        return tree

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a function or method, and spend for its arguments and its result."""
        assert isinstance(context, LimitedContext)
        method = getattr(function, "__wrapped__", function)  # `format` is wrapped
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str):
            args = tuple([list(arg) if isinstance(arg, Iterator) else arg for arg in args])
            context.before(method.__name__, owner, args, {name: kwargs[name] for name in kwargs if name not in _SCOPES})
            return context.after(super().call(context, function, *args, **kwargs))
        if not isinstance(function, Macro):
            if type(owner) in (list, tuple):
                context.spend(context.size(owner))
            for arg in (*args, *[kwargs[name] for name in kwargs if name not in _SCOPES]):
                if type(arg) is str:
                    context.spend(len(arg))
                elif type(arg) not in SCALARS:
                    context.has_shared = True
                    context.spend(context.size(arg))
        return super().call(context, function, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute `*`, `**` or `%`, and spend for it before."""
        assert isinstance(context, LimitedContext)
        if operator == "%":
            if isinstance(left, str):
                context.formatted(left, right)
        elif isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * max(right, 1) if operator == "**" else left.bit_length() + right.bit_length()
            if bits > MOST_BITS:
                raise breach()
        else:
            context.has_shared = True
            for value, times in ((left, right), (right, left)):
                if isinstance(value, str | list | tuple) and isinstance(times, int):
                    context.spend(NODE * len(value) * max(times, 0))
        return super().call_binop(context, operator, left, right)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Allow known methods, and what Jinja's own objects have."""
        names = _METHODS.get(type(obj).__name__)
        known = isinstance(obj, _OWN_TYPES) if names is None else attr in names
        return known and super().is_safe_attribute(obj, attr, value)


def _sum(items: Iterable[Any], attribute: str | None = None) -> Any:
    """Add numbers only: adding lists one by one takes long."""
    return sum(items if attribute is None else [item.get(attribute, 0) for item in items])


_PASSED = {PassedArgument.eval_context: "eval_ctx", PassedArgument.environment: "environment"}


def _metered(name: str, function: Any) -> Any:
    passed = PassedArgument.from_obj(function)

    def leading(context: LimitedContext) -> tuple[Any, ...]:
        if passed is None:
            return ()
        return (context if passed is PassedArgument.context else getattr(context, _PASSED[passed]),)

    @pass_context
    def deep(context: LimitedContext, value: Any, *args: Any, **kwargs: Any) -> Any:
        if type(value) is str and not args and not kwargs and passed is None:
            context.left -= NODE + 2 * len(value)
            if context.left < 0:
                context.spend(0)
            return function(value)
        if isinstance(value, Iterator):
            value = list(value)
        context.before(name, value, args, kwargs)
        return context.after(function(*leading(context), value, *args, **kwargs))

    @pass_context
    def shallow(context: LimitedContext, value: Any, *args: Any, **kwargs: Any) -> Any:
        units = NODE
        for arg in (*args, *kwargs.values()):
            units += len(arg) if isinstance(arg, str) else context.size(arg)
            context.has_shared |= not isinstance(arg, str)
        result = function(*leading(context), loop(context, value, units), *args, **kwargs)
        return context.counted(result, units) if isinstance(result, Iterator) else context.after(result)

    return shallow if name in _SHALLOW else deep
