"""A calculator that the model calls with JSON in a chat: a minimal tool-calling environment."""

import ast
import json
import operator
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from verlite.envs.step import Step

CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_MAX_CHARACTERS = 200
_MAX_RESULT = 10.0**100
_MAX_POWER = 100
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
    """The environment of one sample. A turn without a call is the answer and ends the sample."""

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

    async def resume(self, turns: Sequence[str]) -> None:
        """Do nothing: answers depend on the turn alone."""

    async def step(self, text: str, last: bool) -> Step:
        """See `Env.step`. If the expression has no value, the observation is an error message."""
        # Text after the last closing tag is left out, so the regex takes linear time.
        end = text.rfind("</tool_call>") + len("</tool_call>")
        calls = CALL.findall(text[:end])
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
    """Return the expression of a turn's only call. Raises ValueError for a malformed call."""
    if len(calls) != 1:
        raise ValueError("one <tool_call> per turn" if calls else "the <tool_call> is not closed")
    try:
        call = json.loads(calls[0])
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the call is not valid JSON: {error}") from error
    if not isinstance(call, dict) or call.get("name") != "calculator":
        raise ValueError('the only tool is "calculator"')
    arguments = call.get("arguments")
    if not isinstance(arguments, dict) or not isinstance(arguments.get("expression"), str):
        raise ValueError('arguments must be {"expression": "..."}')
    expression: str = arguments["expression"]
    return expression


def calculate(expression: str) -> float:
    """Return the value of an expression of numbers, + - * / // % ** and brackets.

    The expression is parsed and never evaluated as Python.

    Raises:
        ValueError: the expression contains anything else, or is too long or too large.
        ArithmeticError: the expression has no value, such as 1 / 0.
    """
    if len(expression) > _MAX_CHARACTERS:
        raise ValueError(f"the expression has more than {_MAX_CHARACTERS} characters")
    try:
        with warnings.catch_warnings(action="ignore"):  # Python warns about a model's style
            tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError("the expression cannot be read") from error
    return _value(tree.body)


def _value(node: ast.expr) -> float:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            value = number
        case ast.BinOp(left=left, op=ast.Pow() as op, right=right):
            base = _value(left)
            power = _value(right)
            if abs(power) > _MAX_POWER:
                raise ValueError(f"powers go up to {_MAX_POWER}")
            value = _OPERATIONS[type(op)](base, power)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATIONS:
            value = _OPERATIONS[type(op)](_value(left), _value(right))
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATIONS:
            value = _OPERATIONS[type(op)](_value(operand))
        case _:
            raise ValueError("only numbers, + - * / // % ** and brackets")
    if isinstance(value, complex) or not abs(value) <= _MAX_RESULT:
        raise ValueError("the result is not a real number, or too large")
    return value
