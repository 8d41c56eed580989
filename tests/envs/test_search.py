"""Search-R1's texts and rules, word for word; invalid actions and tool failures."""

import asyncio
import time

import pytest

from verlite.envs.search import Found, SearchEnv, passages_text
from verlite.envs.step import ToolError

INVALID = (
    "\nMy previous action is invalid. If I want to search, I should put the query between <search> "
    "and </search>. If I want to give the final answer, I should put the answer between <answer> "
    "and </answer>. Let me try again.\n"
)


class Engine:
    def __init__(self, *passages, fault=None):
        self.passages = list(passages)
        self.fault = fault
        self.asked = []

    async def search(self, query):
        self.asked.append(query)
        if self.fault:
            raise self.fault
        return Found(self.passages, 0.5, 1, False)


def step(text, engine=None, last=False, **kwargs):
    return asyncio.run(SearchEnv(engine or Engine(), **kwargs).step(text, last))


def whole(step):
    return step.before + step.obs + step.after


def test_search_result_has_the_published_format():
    engine = Engine(
        '"Paul Walker"\nPaul Walker was an actor.\nHe died in 2013.',
        '"Eiffel Tower"\nIt stands in Paris.',
    )
    answer = step("<think>who?</think>\n<search> Paul Walker\n</search>", engine)
    assert engine.asked == ["Paul Walker"]
    assert whole(answer) == (
        '\n\n<information>Doc 1(Title: "Paul Walker") Paul Walker was an actor.\nHe died in 2013.\n'
        'Doc 2(Title: "Eiffel Tower") It stands in Paris.</information>\n\n'
    )
    assert answer.before == "\n\n<information>" and answer.after == "</information>\n\n", (
        "the tags are never truncated"
    )
    assert answer.valid and not answer.done
    assert answer.info == {
        "action": "search",
        "query": "Paul Walker",
        "called": True,
        "seconds": 0.5,
        "retries": 1,
        "cached": False,
        "hits": 2,
    }


def test_passage_without_text_is_a_title():
    assert passages_text(["Only a line"]) == "Doc 1(Title: Only a line)"
    assert passages_text([]) == ""


def test_answer_ends_the_sample():
    for last in (False, True):
        answer = step("<think>done</think><answer> Paris </answer>", last=last)
        assert answer.done and answer.valid and whole(answer) == ""


@pytest.mark.parametrize(
    "text",
    [
        "I do not know.",
        "",
        "<search>no end",
        "<answer>no end",
        "<search>x</answer>",
        "</search>",
        "<search></search>",
        "<search> \n </search>",
        "<SEARCH>x</SEARCH>",
        "<information>made up</information>",
    ],
)
def test_invalid_action_is_reported_to_the_model_without_a_search(text):
    engine = Engine("t\nx")
    answer = step(text, engine)
    assert not answer.valid and not answer.done and whole(answer) == INVALID and not engine.asked


def test_first_closing_tag_decides():
    """The earliest closing tag ends the turn. Tags opened before and never closed do not count."""
    engine = Engine("t\nx")
    assert not step("<answer> A <search> q </search>", engine).done
    assert engine.asked == ["q"]
    assert step("<search> q <answer> A </answer>", engine).done and engine.asked == ["q"]


def test_no_search_in_the_last_turn():
    engine = Engine("t\nx")
    answer = step("<search>late</search>", engine, last=True)
    assert not engine.asked and not answer.done and answer.valid and "called" not in answer.info


def test_no_results_and_failures_are_different():
    assert (
        whole(step("<search>x</search>")) == "\n\n<information>No results found.</information>\n\n"
    )
    broken = Engine(fault=ToolError("down"))
    with pytest.raises(ToolError, match="down"):
        step("<search>x</search>", broken)
    observed = step("<search>x</search>", broken, observe_errors=True)
    assert "does not answer" in whole(observed)
    assert observed.info["error"] == "down"
    assert "called" not in observed.info


def test_unclosed_tags_are_parsed_in_linear_time():
    began = time.process_time()
    assert not step("<search> <answer> " * 10_000).valid
    assert step("<search> " * 10_000 + "<answer>A</answer>").done
    assert time.process_time() - began < 0.5
