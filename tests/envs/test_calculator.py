"""Calculator calls in JSON: valid calls, malformed calls, and hostile expressions."""

import asyncio
import json
import math
import random
import time

import pytest

from verlite.envs.calculator import Calculator, calculate


def step(text, last=False):
    return asyncio.run(Calculator().step(text, last))


def call(expression, name="calculator", **more):
    body = json.dumps({"name": name, "arguments": {"expression": expression}, **more})
    return f"<tool_call>\n{body}\n</tool_call>"


def quick(function, *arguments, limit_s=0.5):
    began = time.process_time()
    try:
        return function(*arguments)
    finally:
        assert time.process_time() - began < limit_s


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("(3 + 4) * 12", "84"),
        ("2 ** 10", "1024"),
        ("-7 // 2", "-4"),
        ("7 % 4", "3"),
        ("1 / 8", "0.125"),
        ("+1.5e2", "150"),
        ("2 ** -1", "0.5"),
        ("-2 ** 2", "-4"),
        (" 1\n", "1"),
        ("1_000 + 1", "1001"),
        ("10 ** 99", "1e+99"),
    ],
)
def test_call_returns_the_result(expression, result):
    answer = step(f"<think>sum</think>{call(expression)}")
    assert (answer.obs, answer.valid, answer.done) == (result, True, False)
    assert answer.info == {"action": "calculator", "query": expression, "called": True}


def test_results_equal_python_on_random_expressions():
    rng = random.Random(0)

    def expression(depth):
        if depth == 0:
            return rng.choice([str(rng.randrange(1, 100)), f"{rng.uniform(0, 9):.2f}"])
        left = expression(depth - 1)
        operator = rng.choice(["+", "-", "*", "/", "//", "%"])
        sign = rng.choice(["", "-"])
        return f"({left} {operator} {sign}{expression(depth - 1)})"

    done = 0
    for _ in range(300):
        text = expression(rng.randrange(1, 4))
        try:
            expected = eval(text)  # the reference; the test wrote this text
        except ZeroDivisionError:
            with pytest.raises(ZeroDivisionError):
                calculate(text)
        else:
            assert calculate(text) == expected
            done += 1
    assert done > 200


@pytest.mark.parametrize("last", [False, True])
def test_turn_without_a_call_ends_the_sample(last):
    answer = step("It is 84.", last)
    assert answer.done and answer.valid and answer.obs == "" and answer.info == {"action": "answer"}


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<tool_call>{'name': 'calculator'}</tool_call>", "not valid JSON"),
        ("<tool_call></tool_call>", "not valid JSON"),
        (call("1") + call("2"), "one <tool_call> per turn"),
        ("<tool_call>" + call("1"), "not valid JSON"),
        ("<tool_call>{", "is not closed"),
        (call("1", name="python"), 'the only tool is "calculator"'),
        ("<tool_call>[1]</tool_call>", "the only tool"),
        (call("1", arguments="1 + 1"), "arguments must be"),
        (call("1", arguments={"expr": "1"}), "arguments must be"),
        (call(7), "arguments must be"),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "not valid JSON"),
        (
            '<tool_call>{"name": "calculator", "arguments": {"expression": '
            + "9" * 5000
            + "}}</tool_call>",
            "not valid JSON",
        ),
    ],
)
def test_malformed_call_is_an_invalid_step(text, message, last):
    answer = quick(step, text, last)
    assert (
        not answer.valid
        and not answer.done
        and answer.obs.startswith("error: ")
        and message in answer.obs
    )
    assert answer.info == {"action": "invalid"}


@pytest.mark.parametrize(
    "expression",
    [
        "9**9**9",
        "10**101",
        "1e200 * 1",
        "((10**99)**100)**100",
        "2**1e9",
        "1e400",
        "-1e400 + 1e400",
        "(-8) ** 0.5",
        "1 / 0",
        "1 % 0",
        "0 ** -1",
        "(" * 99 + ")" * 99,
        "(" * 199,
        "-" * 300 + "1",
        "9" * 200,
        "9" * 201,
        "",
        " ",
        "1 +",
        "1; 2",
        "\0",
        "\ud800",
        "１ + ",
        "x = 1",
        "2j",
        "True",
        "'a' * 9",
        "[1] * 9",
        "1 < 2",
        "1 if 1 else 2",
        "lambda: 1",
        "abs(1)",
        "__import__('os').system('false')",
        "(1).__class__",
        "1 << 9",
        "~1",
        "1 @ 1",
        "1 and 2",
        "f'{1}'",
        "*1",
    ],
)
def test_expression_without_a_value_is_an_error_message(expression):
    with pytest.raises((ValueError, ArithmeticError)):
        quick(calculate, expression)
    answer = quick(step, call(expression))
    assert answer.obs.startswith("error: ") and answer.valid and not answer.done, (
        "the call itself is valid"
    )


def test_expressions_are_not_evaluated_as_python(tmp_path):
    witness = tmp_path / "run"
    for expression in (
        f"open({str(witness)!r}, 'w')",
        f"__import__('pathlib').Path({str(witness)!r}).touch()",
    ):
        with pytest.raises(ValueError, match="only numbers"):
            calculate(expression)
    assert not witness.exists()


@pytest.mark.parametrize("seed", range(3))
def test_random_text_is_handled_quickly(seed):
    rng = random.Random(seed)
    for _ in range(300):
        expression = "".join(rng.choices("0123456789.e+-*/%() j_'", k=rng.randrange(1, 200)))
        try:
            value = quick(calculate, expression)
        except (ValueError, ArithmeticError):
            continue
        assert math.isfinite(value) and abs(value) <= 1e100


def test_unclosed_calls_are_parsed_in_linear_time():
    answer = quick(step, "<tool_call> {" * 10_000)
    assert "is not closed" in answer.obs
    answer = quick(step, "<tool_call> {" * 10_000 + call("1"))
    assert not answer.valid


def test_no_calculation_in_the_last_turn():
    answer = step(call("1 + 1"), last=True)
    assert answer.obs == "" and answer.valid and not answer.done
    assert answer.info == {"action": "calculator not executed", "query": "1 + 1"}
