"""Places for mutants in Python, from the syntax tree.

Comments, strings, imports and annotations have none.
"""

from __future__ import annotations

import ast
import itertools
import re

from .sites import EXTREMES, SWAPS, Site, one_more


class _PythonSites:
    """Collects the places of a module from its syntax tree."""

    #: Fields of the tree whose text computes nothing.
    LEFT_OUT = ("annotation", "returns", "type_comment")

    def __init__(self, source: str) -> None:
        self.source = source
        self.lines = source.splitlines(keepends=True)
        self.starts = [0, *itertools.accumulate(map(len, self.lines))]
        self.found: list[Site] = []

    def position(self, line: int, column: int) -> int:
        """The place in the text of a line and a column; the tree counts columns in bytes."""
        return self.starts[line - 1] + len(self.lines[line - 1].encode()[:column].decode())

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        end = self.position(node.end_lineno or 0, node.end_col_offset or 0)
        return self.position(node.lineno, node.col_offset), end

    def replace(self, node: ast.expr | ast.stmt, new: str, kind: str) -> None:
        self.found.append(Site(*self.span(node), new, kind))

    def swap(self, left: ast.expr, right: ast.expr, kind: str) -> None:
        """The operator between two operands, beside which there may be brackets and comments."""
        first, last = self.span(left)[1], self.span(right)[0]
        between = re.sub(r"#[^\n]*", lambda comment: " " * len(comment[0]), self.source[first:last])
        for operator in re.finditer(
            r"is\s+not\b|not\s+in\b|\b(?:is|in|and|or)\b|//|[<>=!]=|[-+*/%<>]", between
        ):
            new = SWAPS.get(" ".join(operator[0].split()))
            if new is not None:
                self.found.append(Site(first + operator.start(), first + operator.end(), new, kind))
            return

    def visit(self, node: ast.AST, in_function: bool = False) -> None:
        if isinstance(node, (ast.JoinedStr, ast.Import, ast.ImportFrom)):
            return
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            return
        if isinstance(node, (ast.If, ast.IfExp)):
            start, end = self.span(node.test)
            self.replace(node.test, f"not ({self.source[start:end]})", "condition")
        elif isinstance(node, ast.Compare):
            operands = [node.left, *node.comparators]
            for left, right in itertools.pairwise(operands):
                self.swap(left, right, "relation")
        elif isinstance(node, ast.BinOp) and isinstance(
            node.op, (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod)
        ):
            self.swap(node.left, node.right, "arithmetic")
        elif isinstance(node, ast.BoolOp):
            for left, right in itertools.pairwise(node.values):
                self.swap(left, right, "and or")
        elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
            start, end = self.span(node)
            larger = one_more(self.source[start:end])
            if larger is not None:
                self.replace(node, larger, "constant")
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in EXTREMES:
            self.replace(node.func, EXTREMES[node.func.id], "extreme")
        elif isinstance(node, ast.Return) and node.value is not None:
            if not (isinstance(node.value, ast.Constant) and node.value.value is None):
                self.replace(node, "return None", "return")
        elif in_function and (
            isinstance(node, (ast.Assign, ast.AugAssign))
            or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call))
        ):
            self.replace(node, "pass", "statement")
        in_function = in_function or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        for field, value in ast.iter_fields(node):
            if field not in self.LEFT_OUT:
                for child in value if isinstance(value, list) else [value]:
                    if isinstance(child, ast.AST):
                        self.visit(child, in_function)


def python_sites(source: str) -> list[Site]:
    found = _PythonSites(source)
    found.visit(ast.parse(source))
    return found.found
