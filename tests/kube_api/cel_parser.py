"""CEL's grammar, as far as rules use it: text to a tree that `cel_types` checks; `cel` itself runs them."""

import re
from dataclasses import dataclass

_TOKEN = re.compile(
    r"\s*(?:(?P<text>[rRbB]?(?:\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*'))"
    r"|(?P<double>\d+\.\d+(?:[eE][-+]?\d+)?|\d+[eE][-+]?\d+)|(?P<uint>\d+[uU])|(?P<int>0x[0-9a-fA-F]+|\d+)"
    r"|(?P<name>[A-Za-z_]\w*)"
    r"|(?P<sign>&&|\|\||==|!=|<=|>=|\.\?|\[\?|[-+*/%!<>?:.,()\[\]{}]))"
)
_LEVELS = (("||",), ("&&",), ("==", "!=", "<", "<=", ">", ">=", "in"), ("+", "-"), ("*", "/", "%"))
_WORDS = {"true": "bool", "false": "bool", "null": "null"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One expression. `kind`: literal, name, select, index, call, list, map; `word`: type, name, field, function."""

    kind: str
    word: str = ""
    on: "Node | None" = None  # what a field or an item is taken from, or a method called on
    parts: tuple["Node", ...] = ()
    text: str = ""


class CelSyntaxError(ValueError):
    """Not CEL, or CEL that this parser does not read."""


def parse(rule: str) -> Node:
    """The tree; operators are calls of `_op_`, as in CEL's own AST."""
    parser = _Parser(rule)
    tree = parser.conditional()
    if parser.peek():
        raise CelSyntaxError(f"unexpected {parser.peek()!r}")
    return tree


class _Parser:
    def __init__(self, rule: str) -> None:
        self._tokens: list[tuple[str, str]] = []
        position = 0
        rule = rule.rstrip()
        while position < len(rule):
            found = _TOKEN.match(rule, position)
            if not found or found.lastgroup is None:
                raise CelSyntaxError(f"unexpected {rule[position:]!r}")
            self._tokens.append((found.lastgroup, found[found.lastgroup]))
            position = found.end()
        self._at = 0

    def peek(self) -> str:
        kind, text = self._tokens[self._at] if self._at < len(self._tokens) else ("", "")
        return "" if kind == "text" else text

    def _take(self) -> tuple[str, str]:
        if self._at >= len(self._tokens):
            raise CelSyntaxError("unexpected end")
        self._at += 1
        return self._tokens[self._at - 1]

    def _accept(self, *signs: str) -> str:
        sign = self.peek()
        if sign and sign in signs:
            self._at += 1
            return sign
        return ""

    def _expect(self, sign: str) -> None:
        if not self._accept(sign):
            raise CelSyntaxError(f"expected {sign!r}, found {self.peek()!r}")

    def conditional(self) -> Node:
        condition = self._binary(0)
        if not self._accept("?"):
            return condition
        yes = self.conditional()
        self._expect(":")
        return Node(kind="call", word="_?_:_", parts=(condition, yes, self.conditional()))

    def _binary(self, level: int) -> Node:
        if level == len(_LEVELS):
            return self._unary()
        left = self._binary(level + 1)
        while sign := self._accept(*_LEVELS[level]):
            left = Node(kind="call", word=f"_{sign}_", parts=(left, self._binary(level + 1)))
        return left

    def _unary(self) -> Node:
        sign = self._accept("!", "-")
        if sign:
            return Node(kind="call", word=f"{sign}_", parts=(self._unary(),))
        return self._members(self._primary())

    def _members(self, value: Node) -> Node:
        while True:
            if self._accept("."):
                word = self._take()[1]
                if self._accept("("):
                    value = Node(kind="call", word=word, on=value, parts=self._items(")"))
                else:
                    value = Node(kind="select", word=word, on=value)
            elif self._accept("["):
                value = Node(kind="index", on=value, parts=self._items("]"))
            else:
                return value

    def _items(self, end: str) -> tuple[Node, ...]:
        items: list[Node] = []
        while not self._accept(end):
            items.append(self.conditional())
            if self.peek() != end:
                self._expect(",")
        return tuple(items)

    def _primary(self) -> Node:
        if self._accept("("):
            inner = self.conditional()
            self._expect(")")
            return inner
        if self._accept("["):
            return Node(kind="list", parts=self._items("]"))
        if self._accept("{"):
            return self._map()
        kind, text = self._take()
        if kind == "name":
            if text in _WORDS:
                return Node(kind="literal", word=_WORDS[text], text=text)
            if self._accept("("):
                return Node(kind="call", word=text, parts=self._items(")"))
            return Node(kind="name", word=text)
        if kind == "sign":
            raise CelSyntaxError(f"unexpected {text!r}")
        return Node(kind="literal", word="string" if kind == "text" else kind, text=text)

    def _map(self) -> Node:
        parts: list[Node] = []
        while not self._accept("}"):
            parts.append(self.conditional())
            self._expect(":")
            parts.append(self.conditional())
            if self.peek() != "}":
                self._expect(",")
        return Node(kind="map", parts=tuple(parts))
