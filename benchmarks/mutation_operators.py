"""The kinds of small faults: each edit of a source file that changes one operator, name or value.

A Python file is read with `ast`, a C++ file line by line with regular expressions. Text, types and
imports are left alone, as no test could catch a fault there.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

__all__ = ["Edit", "edits_of_cpp", "edits_of_python"]


@dataclass(frozen=True)
class Edit:
    """A replacement of some bytes, before it is known whether the file still compiles."""

    operator: str
    start: int
    end: int
    replacement: bytes


#: An edit, the first and the last line of the statement around it, and whether the statement stands
#: outside of every function.
Placed = tuple[Edit, tuple[int, int], bool]

_ARITHMETIC: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Pow: ("**", "*"),
    ast.BitAnd: ("&", "|"),
}
_COMPARISONS: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
_PAIRS = (
    ("mean", "sum"),
    ("min", "max"),
    ("minimum", "maximum"),
    ("amin", "amax"),
    ("argmin", "argmax"),
    ("exp", "expm1"),
    ("log", "log1p"),
    ("any", "all"),
    ("zeros", "ones"),
    ("zeros_like", "ones_like"),
    ("cos", "sin"),
    ("floor", "ceil"),
)
_RENAMED = dict(_PAIRS) | {second: first for first, second in _PAIRS}
_REMOVED = ("sqrt", "square", "abs", "fabs", "exp", "log", "detach")
_MODULES = ("torch", "math", "np")  # whose functions are called with their argument
_SILENT = ("__repr__", "__str__")  # functions of text only
_TEXT_CALLS = ("print", "warn", "cast", "TypeVar", "overload")  # calls of text or of types only
_SYMMETRIC = ("isinstance", "issubclass", "hasattr", "min", "max", "minimum", "maximum", "gcd")


def edits_of_python(text: bytes) -> list[Placed]:
    """List the edits of a Python file; a few of them may not compile."""
    return _Finder(text).find()


class _Finder:
    """Walk over a module and collect the edits of the code that runs."""

    def __init__(self, text: bytes) -> None:
        self._text = text
        self._starts = [0]
        for line in text.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        self._found: list[Placed] = []

    def find(self) -> list[Placed]:
        self._statements(ast.parse(self._text).body, at_import=True)
        return self._found

    def _statements(self, body: Iterable[ast.stmt], *, at_import: bool) -> None:
        for statement in body:
            self._statement(statement, at_import)

    def _statement(self, node: ast.stmt, at_import: bool) -> None:
        """Collect the edits of a statement's own expressions, then those of the nested ones."""
        if _is_text(node):
            return
        nested = [
            part
            for name in ("body", "orelse", "finalbody")
            for part in getattr(node, name, [])
            if isinstance(part, ast.stmt)
        ]
        handlers = [part for each in getattr(node, "handlers", []) for part in each.body]
        last = (node.end_lineno or node.lineno) if not nested else nested[0].lineno - 1
        lines = (node.lineno, max(node.lineno, last))
        for edit in self._of_statement(node):
            self._found.append((edit, lines, at_import))
        for child in _expressions(node):
            for expression in _walk(child):
                for edit in self._of_expression(expression):
                    self._found.append((edit, lines, at_import))
        inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        self._statements([*nested, *handlers], at_import=at_import and not inside)
        for case in getattr(node, "cases", []):
            self._statements(case.body, at_import=at_import)

    def _of_statement(self, node: ast.stmt) -> Iterator[Edit]:
        match node:
            case ast.If(test=test) | ast.While(test=test):
                yield self._negated(test)
            case ast.Return(value=ast.expr() as value) if not _is_none(value):
                yield self._edit("return None", value, b"None")
            case ast.Raise():
                yield self._edit("raise removed", node, b"pass")
            case ast.Expr(value=ast.Call()):
                yield self._edit("call removed", node, b"pass")
            case ast.AugAssign(op=op):
                yield self._edit("update removed", node, b"pass")
                if type(op) in _ARITHMETIC:
                    old, new = _ARITHMETIC[type(op)]
                    yield from self._between("arithmetic", node.target, node.value, old, new)

    def _of_expression(self, node: ast.AST) -> Iterator[Edit]:
        match node:
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
                if not (_is_string(left) or _is_string(right)):
                    old, new = _ARITHMETIC[type(op)]
                    yield from self._between("arithmetic", left, right, old, new)
            case ast.Compare(left=left, ops=ops, comparators=others):
                for compared, (first, second) in zip(ops, pairwise([left, *others]), strict=True):
                    old, new = _COMPARISONS[type(compared)]
                    yield from self._between("comparison", first, second, old, new)
            case ast.BoolOp(op=joint, values=values):
                old, new = ("and", "or") if isinstance(joint, ast.And) else ("or", "and")
                for first, second in pairwise(values):
                    yield from self._between("and, or", first, second, old, new)
            case ast.UnaryOp(op=ast.Not()):
                start, _ = self._span(node)
                yield Edit("not removed", start, start + 3, b"")
            case ast.UnaryOp(op=ast.USub()):
                start, _ = self._span(node)
                yield Edit("sign", start, start + 1, b"+")
            case ast.IfExp(test=test):
                yield self._negated(test)
            case ast.comprehension(ifs=tests):
                yield from map(self._negated, tests)
            case ast.Constant(value=value):
                other = _other_constant(value)
                if other is not None:
                    yield self._edit("constant", node, other.encode())
            case ast.Call():
                yield from self._of_call(node)

    def _of_call(self, node: ast.Call) -> Iterator[Edit]:
        name = _name(node.func)
        _, end = self._span(node.func)
        if name in _RENAMED:
            yield Edit("function", end - len(name), end, _RENAMED[name].encode())
        if name in _REMOVED:
            owner = node.func.value if isinstance(node.func, ast.Attribute) else None
            of_module = owner is None or _name(owner) in _MODULES
            if of_module and len(node.args) == 1 and not node.keywords:
                yield self._edit("function removed", node, b"(%b)" % self._source(node.args[0]))
            elif owner is not None and not (node.args or node.keywords):
                yield self._edit("function removed", node, self._source(owner))
        for keyword in node.keywords:
            if keyword.arg is not None:
                yield self._without(node, keyword)
        plain = [each for each in node.args[:2] if not isinstance(each, ast.Starred)]
        if len(plain) == 2 and name not in _SYMMETRIC:
            (start, first_end), (second_start, stop) = map(self._span, plain)
            text = self._text
            swapped = text[second_start:stop] + text[first_end:second_start] + text[start:first_end]
            if swapped != text[start:stop]:
                yield Edit("arguments swapped", start, stop, swapped)

    def _without(self, call: ast.Call, keyword: ast.keyword) -> Edit:
        """Drop a keyword argument and one of the commas around it."""
        start, end = self._span(keyword)
        _, stop = self._span(call)
        after = re.match(rb"\s*,", self._text[end:stop])
        if after:
            end += after.end()
        else:
            before = re.search(rb",\s*\Z", self._text[:start])
            start = before.start() if before else start
        return Edit("keyword removed", start, end, b"")

    def _negated(self, test: ast.expr) -> Edit:
        return self._edit("condition negated", test, b"(not (%b))" % self._source(test))

    def _between(
        self, name: str, left: ast.expr, right: ast.expr, old: str, new: str
    ) -> Iterator[Edit]:
        """Replace the operator that stands between two operands, unless a comment does as well."""
        start, stop = self._span(left)[1], self._span(right)[0]
        between = self._text[start:stop]
        pattern = rb"\b%b\b" if old[0].isalpha() else rb"%b"
        found = re.search(pattern % re.escape(old.encode()), between)
        if found and b"#" not in between:
            yield Edit(name, start + found.start(), start + found.end(), new.encode())

    def _edit(self, name: str, node: ast.AST, replacement: bytes) -> Edit:
        return Edit(name, *self._span(node), replacement)

    def _span(self, node: ast.AST) -> tuple[int, int]:
        """Return the bytes of a node; `ast` counts the columns in bytes."""
        assert isinstance(node, ast.expr | ast.stmt | ast.keyword)
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return (
            self._starts[node.lineno - 1] + node.col_offset,
            self._starts[node.end_lineno - 1] + node.end_col_offset,
        )

    def _source(self, node: ast.AST) -> bytes:
        start, end = self._span(node)
        return self._text[start:end]


def _is_text(node: ast.stmt) -> bool:
    """Tell whether a statement holds text or types only: no fault of it could be caught."""
    match node:
        case ast.Import() | ast.ImportFrom() | ast.Assert():
            return True
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            decorators = {_name(each) for each in node.decorator_list}
            return node.name in _SILENT or "overload" in decorators
        case ast.Expr(value=ast.Constant()):
            return True
        case ast.Expr(value=ast.Call(func=function)):
            return _name(function) in _TEXT_CALLS
        case ast.If(test=test):
            return _name(test) == "TYPE_CHECKING"
        case ast.Assign(targets=[ast.Name(id=name)]):
            return name in {"__all__", "__slots__"}
        case ast.ClassDef():
            return any(_name(base) in {"Protocol", "TypedDict"} for base in node.bases)
    return False


def _expressions(node: ast.stmt) -> Iterator[ast.AST]:
    """Yield a statement's own expressions, without annotations, messages and nested statements."""
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            yield from (each for each in node.args.defaults)
            yield from (each for each in node.args.kw_defaults if each is not None)
        case ast.ClassDef() | ast.Raise() | ast.Try():
            return
        case ast.AnnAssign(value=value):
            if value is not None:
                yield value
        case _:
            yield from (
                each
                for each in ast.iter_child_nodes(node)
                if isinstance(each, ast.expr | ast.withitem)
            )


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and what is below it, without formatted text and calls of text."""
    if isinstance(node, ast.JoinedStr):
        return
    if isinstance(node, ast.Call) and _name(node.func) in _TEXT_CALLS:
        return
    yield node
    for child in ast.iter_child_nodes(node):
        yield from _walk(child)


def _name(node: ast.AST) -> str:
    """Return the last part of a dotted name; empty for other expressions."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case ast.Call(func=function):
            return _name(function)
    return ""


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _is_string(node: ast.expr) -> bool:
    if isinstance(node, ast.BinOp):
        return _is_string(node.left) or _is_string(node.right)
    return isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)
    )


def _other_constant(value: object) -> str | None:
    match value:
        case bool():
            return str(not value)
        case int():
            return str(value + 1)
        case float():
            return repr(1.0 if value == 0 else value / 2 if abs(value) < 1 else value * 2)
    return None


_CPP: tuple[tuple[str, str, Callable[[re.Match[str]], str]], ...] = (
    ("arithmetic", r"(?<= )[-+*/](?= )", lambda m: {"+": "-", "-": "+", "*": "+", "/": "*"}[m[0]]),
    ("arithmetic", r"(?<= )[-+]=(?= )", lambda m: {"+=": "-=", "-=": "+="}[m[0]]),
    (
        "comparison",
        r"(?<= )(?:<|>|<=|>=|==|!=)(?= )",
        lambda m: {"<": "<=", ">": ">=", "<=": "<", ">=": ">", "==": "!=", "!=": "=="}[m[0]],
    ),
    ("and, or", r"&&|\|\|", lambda m: {"&&": "||", "||": "&&"}[m[0]]),
    ("function", r"\bstd::(?:max|min)\b", lambda m: "std::m" + ("in" if "x" in m[0] else "ax")),
    ("sign", r"(?<=[(= ])-(?=[\w(])", lambda _: "+"),
    ("constant", r"\bReal\(1\)", lambda _: "Real(2)"),
    ("constant", r"\b\d+\.\d+(?:e-?\d+)?(?=f?\b)", lambda m: _other_constant(float(m[0])) or m[0]),
    ("constant", r"(?<=[=/%>] )\d(?=[;)\s])", lambda m: str(int(m[0]) + 1)),
)
#: Lines without code, and loops, where a fault writes outside of an array.
_CPP_SKIPPED = re.compile(r"\s*(?:#|//|for\b|while\b|struct\b|class\b|template\b|$)")


def edits_of_cpp(text: bytes) -> Iterator[Placed]:
    """Yield the edits of a C++ file."""
    start = 0
    for number, line in enumerate(text.decode().splitlines(keepends=True), 1):
        code = line.partition("//")[0]
        if not _CPP_SKIPPED.match(code):
            for name, pattern, change in _CPP:
                for found in re.finditer(pattern, code):
                    first, last = (
                        start + len(code[:at].encode()) for at in (found.start(), found.end())
                    )
                    edit = Edit(name, first, last, change(found).encode())
                    yield edit, (number, number), False
        start += len(line.encode())
