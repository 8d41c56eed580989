"""A calculator that the model calls with JSON in a chat: the smallest tool of the kind that chat models know."""

import ast
import json
import operator
import re
import warnings
from collections.abc import Callable
from typing import Any, ClassVar

from verlite.envs.step import Step

CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_LONGEST, _LARGEST, _HIGHEST_POWER = 200, 10.0**100, 100
_OPERATIONS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}


class Calculator:
    """One sample's calls. A turn without a call is the answer, and ends the sample."""

    stop: tuple[str, ...] = ()
    schema: ClassVar[dict[str, Any]] = {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "Work out an arithmetic expression.",
            "parameters": {
                "type": "object",
                "properties": {
                    "expression": {"type": "string", "description": "Such as (3 + 4) * 12"}
                },
                "required": ["expression"],
            },
        },
    }

    async def step(self, text: str, last: bool) -> Step:
        """See `Env.step`. What the calculator cannot work out is told to the model, as any calculator would."""
        calls = CALL.findall(
            text[: text.rfind("</tool_call>") + len("</tool_call>")]
        )  # not through openings that have no end
        if not calls and "<tool_call>" not in text:
            return Step(done=True, info={"action": "answer"})
        try:
            expression = _expression(calls)
        except ValueError as error:
            return Step(f"error: {error}", valid=False, info={"action": "invalid"})
        if last:
            return Step(info={"action": "calculator not executed", "query": expression})
        try:
            result = f"{calculate(expression):.12g}"
        except (ValueError, ArithmeticError) as error:
            result = f"error: {error}"
        return Step(result, info={"action": "calculator", "query": expression, "called": True})


def _expression(calls: list[str]) -> str:
    """The expression of a turn's one call. Raises ValueError, which says what is wrong with the call."""
    if len(calls) != 1:
        raise ValueError("one whole <tool_call> a turn" if calls else "the <tool_call> has no end")
    try:
        call = json.loads(calls[0])
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the call is no JSON: {error}") from error
    if not isinstance(call, dict) or call.get("name") != "calculator":
        raise ValueError('there is one tool, "calculator"')
    arguments = call.get("arguments")
    if not isinstance(arguments, dict) or not isinstance(arguments.get("expression"), str):
        raise ValueError('arguments must be {"expression": "..."}')
    return arguments["expression"]


def calculate(expression: str) -> float:
    """The value of an expression of numbers, + - * / // % ** and brackets; it is parsed, never evaluated as Python.

    Raises ValueError for anything else or too much of it, ArithmeticError for what has no value.
    """
    if len(expression) > _LONGEST:
        raise ValueError(f"the expression has more than {_LONGEST} characters")
    try:
        with warnings.catch_warnings(
            action="ignore"
        ):  # what Python thinks of a model's style is nobody's concern
            tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError("the expression cannot be read") from error
    return _value(tree.body)


def _value(node: ast.expr) -> float:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            value = number
        case ast.BinOp(left=left, op=ast.Pow() as op, right=right):
            base, power = _value(left), _value(right)
            if abs(power) > _HIGHEST_POWER:
                raise ValueError(f"powers go up to {_HIGHEST_POWER}")
            value = _OPERATIONS[type(op)](base, power)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATIONS:
            value = _OPERATIONS[type(op)](_value(left), _value(right))
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATIONS:
            value = _OPERATIONS[type(op)](_value(operand))
        case _:
            raise ValueError("only numbers, + - * / // % ** and brackets")
    if isinstance(value, complex) or not abs(value) <= _LARGEST:
        raise ValueError("the result is no number, or too large")
    return value
