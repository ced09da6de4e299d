"""The recipe's tool: arithmetic. verl loads the file in each agent-loop worker; the model sees the docstring."""

from __future__ import annotations

import ast
import operator

from verl.tools.function_tool import function_tool

_OPERATIONS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
}


def _value(node: ast.AST) -> float:
    if isinstance(node, ast.Expression):
        return _value(node.body)
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return _OPERATIONS[type(node.op)](_value(node.left), _value(node.right))
    if isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATIONS:
        return _OPERATIONS[type(node.op)](_value(node.operand))
    raise ValueError("only numbers and + - * / are allowed")


@function_tool("calculator")
def calculator(expression: str) -> str:
    """Computes an arithmetic expression.

    Args:
        expression: Numbers with + - * / and parentheses, for example (12 + 4) / 8.
    """
    try:
        return f"{_value(ast.parse(expression[:200], mode='eval')):g}"
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError) as error:
        return f"error: {error}"
