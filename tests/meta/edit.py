"""Edits of a function's syntax tree, by which planted faults are named: what changes, and where it
acts.

``where`` is a module under src/bagua_ref and a function or class in it, ``comm_ops/top_k:largest``;
nothing after the colon is the module itself. ``part`` names one node there by what it does:

- a statement: ``set x``, ``update x`` (+= and the like), ``do f`` (a call), ``if x``, ``while x``,
  ``for x``, ``return``, ``raise E``, ``with f``, ``try``, ``def f``, ``yield``; ``x`` is the first
  name that the condition, target or call mentions;
- an expression: ``call f``, ``compare <``, ``and``, ``or``, ``binary +``, ``unary not``, ``constant
  255``, ``name x``, ``attribute a.b``, ``index x``, ``argument out`` (a keyword), ``choice`` (x if
  y else z), ``each x`` (a comprehension).

``A inside B`` is what it says, and ``A #2/3`` is the second of three. The replacement is code in
which ``$`` stands for the node and ``$1``, ``$2`` for its operands, arguments, elements, value or
condition, in the order of the source; "" removes a statement.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

PACKAGE = Path(__file__).parents[2] / "src/bagua_ref"

SYMBOLS = {
    "Add": "+",
    "Sub": "-",
    "Mult": "*",
    "Div": "/",
    "FloorDiv": "//",
    "Mod": "%",
    "Pow": "**",
    "MatMult": "@",
    "LShift": "<<",
    "RShift": ">>",
    "BitOr": "|",
    "BitAnd": "&",
    "BitXor": "^",
    "Eq": "==",
    "NotEq": "!=",
    "Lt": "<",
    "LtE": "<=",
    "Gt": ">",
    "GtE": ">=",
    "Is": "is",
    "IsNot": "is not",
    "In": "in",
    "NotIn": "not in",
    "Not": "not",
    "USub": "-",
    "UAdd": "+",
    "Invert": "~",
}


def tree_of(where: str) -> ast.Module:
    """Return the syntax tree of the module that ``where`` names."""
    return ast.parse(path_of(where).read_text(encoding="utf-8"))


def path_of(where: str) -> Path:
    return PACKAGE / f"{where.partition(':')[0]}.py"


def module_of(where: str) -> str:
    """Return the name by which the module of ``where`` is imported."""
    return ".".join(path_of(where).relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(
        ".__init__"
    )


def change_code(where: str, text: str) -> bool:
    """Give the imported function its code from the module's changed ``text``; False if the change
    is to more than its body.
    """
    code = compile(text, str(path_of(where)), "exec", dont_inherit=True)
    found: Any = importlib.import_module(module_of(where))
    for name in where.partition(":")[2].split("."):
        inside = [
            const
            for const in code.co_consts
            if isinstance(const, CodeType) and const.co_name == name
        ]
        if not inside:
            return False
        code, found = inside[-1], vars(found)[name]
        if not isinstance(found, type):
            break
    for inner in ("fget", "func", "__func__"):  # of properties, cached ones and class methods
        found = getattr(found, inner, found)
    function = inspect.unwrap(found)
    if not isinstance(function, FunctionType) or function.__code__.co_freevars != code.co_freevars:
        return False
    function.__code__ = code
    return True


def planted(where: str, *changes: str) -> str:
    """Return the changed module's text."""
    return ast.unparse(edited(where, *changes)) + "\n"


def edited(where: str, *changes: str) -> ast.Module:
    """Return the module's tree with ``changes``, pairs of a part and its replacement, made in the
    place.

    Raises:
        LookupError: the place or a part does not exist, or is not the only one of its name.
    """
    tree = tree_of(where)
    place, nodes = parts(tree, where, *changes[::2])
    for node, part, new in zip(nodes, changes[::2], changes[1::2], strict=True):
        swap = _Swap(node, _replacement(node, new))
        swap.visit(place)
        if not swap.done or [ast.dump(node)] == [ast.dump(other) for other in swap.new]:
            raise LookupError(f"{where}: {part!r} -> {new!r} changes nothing")
    return tree


def parts(tree: ast.Module, where: str, *names: str) -> tuple[ast.AST, list[ast.AST]]:
    """Return the place of ``where`` in its module's tree, and the nodes there that have these
    names.
    """
    place: Any = tree
    for name in filter(None, where.partition(":")[2].split(".")):
        inside = [
            n
            for n in _nodes(place)
            if isinstance(n, (ast.FunctionDef, ast.ClassDef)) and n.name == name
        ]
        if not inside:
            raise LookupError(f"{where}: there is no {name!r}")
        place = inside[-1]  # the implementation, after its overloads
    return place, [select(place, name, where) for name in names]


def select(place: ast.AST, part: str, where: str = "") -> ast.AST:
    """Return the node of ``place`` that ``part`` names."""
    name, _, count = part.partition(" #")
    wanted, *around = name.split(" inside ")
    named = list(labelled(place))
    matching = [
        node for node, labels in named if labels[0] == wanted and set(around) <= set(labels[1:])
    ]
    position, total = map(int, count.split("/")) if count else (1, 1)
    if len(matching) != total:
        raise LookupError(
            f"{where}: {len(matching)} parts are {part!r}:"
            f" {sorted({labels[0] for _, labels in named})}"
        )
    return matching[position - 1]


def name_of(place: ast.AST, node: ast.AST) -> str:
    """Return the shortest name that `select` finds ``node`` by in ``place``, counted only if
    nothing around it tells it apart.
    """
    everything = _all_labelled(place)
    mine = next(labels for other, labels in everything if other is node)
    counted = ""
    for around in sorted(
        {None, *mine[1:]} - {mine[0], "expr", "block"}, key=lambda label: len(label or "")
    ):
        if around and around.startswith("def "):
            continue
        alike = [
            other
            for other, labels in everything
            if labels[0] == mine[0] and (around is None or around in labels[1:])
        ]
        name = mine[0] if around is None else f"{mine[0]} inside {around}"
        if len(alike) == 1:
            return name
        counted = (
            counted or f"{name} #{[other is node for other in alike].index(True) + 1}/{len(alike)}"
        )
    return counted


@functools.lru_cache(maxsize=8)
def _all_labelled(place: ast.AST) -> list[tuple[ast.AST, list[str]]]:
    return list(labelled(place))


def labelled(place: ast.AST) -> Iterator[tuple[ast.AST, list[str]]]:
    """Yield the nodes of ``place``, in the order of the source, with their labels and those around
    them, innermost first.
    """

    def walk(node: ast.AST, around: list[str]) -> Iterator[tuple[ast.AST, list[str]]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(
                child, (ast.expr_context, ast.operator, ast.cmpop, ast.boolop, ast.unaryop)
            ):
                continue
            labels = [label(child), *around]
            yield child, labels
            yield from walk(child, labels)

    return walk(place, [])


def _nodes(place: ast.AST) -> Iterator[ast.AST]:
    """Yield the statements of ``place`` that no function or class inside it contains."""
    for child in ast.iter_child_nodes(place):
        yield child
        if not isinstance(child, (ast.FunctionDef, ast.ClassDef)):
            yield from _nodes(child)


def dotted(node: ast.AST) -> str:
    """Return ``a.b`` for names; of anything else the last attribute, ``.b``, or its kind."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=attr):
            owner = dotted(value)
            return (
                f"{owner}.{attr}"
                if re.fullmatch(r"[\w.]*\w", owner) and not owner.startswith(".")
                else f".{attr}"
            )
        case ast.Subscript(value=value):
            return f"{dotted(value)}[]"
        case ast.Call(func=value):
            return f"{dotted(value)}()"
        case ast.Starred(value=value):
            return dotted(value)
        case ast.Tuple(elts=[first, *_]) | ast.List(elts=[first, *_]):
            return dotted(first)
    return type(node).__name__.lower()


def _first_name(node: ast.AST) -> str:
    """Return the first name that an expression mentions."""
    names = [n for n in ast.walk(node) if isinstance(n, (ast.Name, ast.Attribute))]
    if not names:
        return ast.unparse(node)
    first = min(names, key=lambda n: (n.lineno, n.col_offset, -(n.end_col_offset or 0)))
    return dotted(first).replace("[]", "").replace("()", "")


def label(node: ast.AST) -> str:
    """Return what a node is called."""
    match node:
        case ast.Assign(targets=[target, *_]) | ast.AnnAssign(target=target):
            return f"set {dotted(target)}"
        case ast.AugAssign(target=target):
            return f"update {dotted(target)}"
        case ast.Expr(value=ast.Call(func=function)):
            return f"do {dotted(function)}"
        case ast.Expr(value=ast.Yield() | ast.YieldFrom()):
            return "yield"
        case ast.If(test=test):
            return f"if {_first_name(test)}"
        case ast.While(test=test):
            return f"while {_first_name(test)}"
        case ast.For(target=target):
            return f"for {dotted(target)}"
        case ast.Return():
            return "return"
        case ast.Raise(exc=ast.Call(func=kind) | (ast.Name() as kind)):
            return f"raise {dotted(kind)}"
        case ast.With(items=[item, *_]):
            return f"with {_first_name(item.context_expr)}"
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
            return f"def {name}"
        case ast.ExceptHandler(type=kind):
            return f"except {dotted(kind)}" if kind else "except"
        case ast.Call(func=function):
            return f"call {dotted(function)}"
        case ast.Compare(ops=ops):
            return f"compare {' '.join(SYMBOLS[type(op).__name__] for op in ops)}"
        case ast.BoolOp(op=op):
            return type(op).__name__.lower()
        case ast.BinOp(op=op):
            return f"binary {SYMBOLS[type(op).__name__]}"
        case ast.UnaryOp(op=op):
            return f"unary {SYMBOLS[type(op).__name__]}"
        case ast.Constant(value=value):
            return "text" if isinstance(value, str) else f"constant {value!r}"
        case ast.Name(id=name):
            return f"name {name}"
        case ast.Attribute():
            return f"attribute {dotted(node)}"
        case ast.Subscript(value=value):
            return f"index {dotted(value)}"
        case ast.keyword(arg=arg):
            return f"argument {arg}"
        case ast.IfExp():
            return "choice"
        case (
            ast.ListComp(generators=[first, *_])
            | ast.GeneratorExp(generators=[first, *_])
            | ast.SetComp(generators=[first, *_])
        ):
            return f"each {dotted(first.target)}"
        case ast.DictComp(generators=[first, *_]):
            return f"each {dotted(first.target)}"
        case ast.comprehension(target=target):
            return f"clause {dotted(target)}"
    return type(node).__name__.lower()


def operands(node: ast.AST) -> list[Any]:
    """Return what ``$1``, ``$2``, ... stand for."""
    match node:
        case ast.Expr(value=value) if isinstance(value, ast.Call):
            return operands(value)
        case ast.Call(args=args, keywords=keywords):
            return [*args, *(keyword.value for keyword in keywords)]
        case ast.BinOp(left=left, right=right):
            return [left, right]
        case ast.Compare(left=left, comparators=others):
            return [left, *others]
        case ast.BoolOp(values=values):
            return values
        case ast.UnaryOp(operand=value):
            return [value]
        case ast.Subscript(value=value, slice=index):
            return [value, index]
        case ast.Attribute(value=value):
            return [value]
        case ast.IfExp(body=body, test=test, orelse=orelse):
            return [body, test, orelse]
        case ast.Tuple(elts=elts) | ast.List(elts=elts) | ast.Set(elts=elts):
            return elts
        case ast.keyword(value=value) | ast.Starred(value=value):
            return [value]
        case ast.Assign(value=value) | ast.AugAssign(value=value) | ast.AnnAssign(value=value):
            return [value]
        case ast.Return(value=value) | ast.Expr(value=value) if value is not None:
            return [value]
        case ast.If(test=test) | ast.While(test=test):
            return [test]
        case ast.For(iter=values):
            return [values]
        case ast.comprehension(iter=values, ifs=ifs):
            return [values, *ifs]
        case (
            ast.ListComp(elt=elt, generators=[first, *_])
            | ast.GeneratorExp(elt=elt, generators=[first, *_])
        ):
            return [elt, first.iter, *first.ifs]
    return []


def _replacement(node: ast.AST, new: str) -> list[Any]:
    """Return the nodes that take the place of ``node``: one, or any number of statements."""
    stand_ins = {
        "_whole_": node,
        **{f"_part{place}_": part for place, part in enumerate(operands(node), 1)},
    }
    text = re.sub(r"\$(\d?)", lambda found: f"_part{found[1]}_" if found[1] else "_whole_", new)
    if isinstance(node, ast.keyword):
        value = _Fill({**stand_ins, "_whole_": node.value}).visit(ast.parse(text, mode="eval").body)
        return [ast.keyword(node.arg, value)]
    if isinstance(node, ast.comprehension):
        return _Fill(stand_ins).visit(ast.parse(f"[0 {text}]", mode="eval").body).generators
    if isinstance(node, ast.expr):
        return [_Fill(stand_ins).visit(ast.parse(text, mode="eval").body)]
    if isinstance(node, ast.ExceptHandler):
        return [
            _Fill({**stand_ins, "_part1_": node.type})
            .visit(ast.parse(f"try: pass\n{text}").body[0])
            .handlers[0]
        ]
    body = _Fill(stand_ins).visit(ast.parse(text)).body
    return body or [ast.Pass()]


class _Fill(ast.NodeTransformer):
    """Puts the parts of the original into a replacement."""

    def __init__(self, stand_ins: dict[str, Any]) -> None:
        self._stand_ins = stand_ins

    def visit_Expr(self, node: ast.Expr) -> Any:
        if isinstance(node.value, ast.Name) and isinstance(
            whole := self._stand_ins.get(node.value.id), ast.stmt
        ):
            return whole
        return self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> Any:
        return self._stand_ins.get(node.id, node)


class _Swap(ast.NodeTransformer):
    """Puts other nodes in the place of one."""

    def __init__(self, old: ast.AST, new: list[Any]) -> None:
        self.old, self.new, self.done = old, new, False

    def visit(self, node: ast.AST) -> Any:
        if node is self.old:
            self.done = True
            return self.new if len(self.new) != 1 else self.new[0]
        return self.generic_visit(node)
