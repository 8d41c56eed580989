"""The conformance suite finds planted faults in verlite's own gateway, which keeps all rules."""

import asyncio
import dataclasses
import itertools
import random

import pytest

from tests.gateway.test_gateway import tokenizer
from verlite.contracts.gateway import DIALECTS, RULES, Row, check_gateway
from verlite.envs.chat import Chat
from verlite.gateway.agents import as_trajectory
from verlite.gateway.conversation import Session
from verlite.gateway.server import Gateway
from verlite.http.server import bind, url
from verlite.rollout.types import Completion, Sampling

WORDS = ["t", "h", "e", "th", "the", "u", "s", "us", "er", "r", " "]
RARE = list("🦩🪱🫎")


class Babbler:
    """Writes pieces at random that no tokenizer would choose, such as "t" and "h" for "th". The
    second answer to "Pick a word." has the text of the first, in other pieces."""

    version = 1
    last_step = 0.0

    def __init__(self, tokens):
        self.tokenizer = tokens
        self.rng = random.Random(0)
        self.first = None

    async def generate(self, prompt_ids, sampling, so_far=None, name=None):
        rng, tokens = self.rng, self.tokenizer
        prompt = tokens.decode(prompt_ids)
        pieces = rng.choices(RARE if "emoji" in prompt.split("user")[-1] else WORDS, k=6)
        ids = [i for piece in pieces for i in tokens.encode(piece, add_special_tokens=False)]
        if "Pick a word" in prompt.split("user")[-1]:
            text = tokens.decode(self.first or ids)
            self.first, ids = None if self.first else ids, self.first or ids
            if self.first is None:
                ids = [i for c in text for i in tokens.encode(c, add_special_tokens=False)]
        ids = [*ids, tokens.eos_token_id][: sampling.max_tokens]
        reason = "stop" if ids[-1] == tokens.eos_token_id else "length"
        log_probs = [-rng.random() for _ in ids]
        return Completion(ids, log_probs, reason, [(1, len(ids))])


def rows_of(session, inverted):
    """Return what is trained of a session: each of its branches."""
    sample = as_trajectory(session, [])
    before = [0] * len(sample.prompt_ids)
    ids = sample.prompt_ids + sample.response_ids
    mask = before + [value ^ inverted for value in sample.response_mask]
    log_probs = before + sample.log_probs
    ends = list(itertools.accumulate(sum(branch) for branch in sample.branches))
    parts = [slice(*span) for span in itertools.pairwise([0, *ends])]
    assert ends[-1] == len(ids)
    return [Row(ids[part], mask[part], log_probs[part]) for part in parts]


def findings_of(inverted=False):
    """Return the state of each rule by (dialect, rule), and the details of those that are not
    kept."""

    async def talk():
        async with Gateway(Babbler(tokenizer()), 4000) as gateway:
            session = gateway.open(Sampling(max_tokens=100))
            found = await asyncio.to_thread(
                check_gateway, session.base_url, session.token, lambda: rows_of(session, inverted)
            )
            return found, session.record

    found, record = asyncio.run(asyncio.wait_for(talk(), 240))
    states = {(finding.dialect, finding.rule): finding.state for finding in found}
    return states, [finding for finding in found if finding.state != "kept"], record


def test_verlites_gateway_keeps_every_rule_in_every_dialect():
    states, others, record = findings_of()
    tokens = [("completions", "tokens"), ("generate", "tokens"), ("all", "rows")]
    pairs = [*itertools.product(DIALECTS, RULES), *tokens]
    counted = [pair for pair in pairs if pair[1] != "counts" or pair[0] == "messages"]
    expected = dict.fromkeys(counted, "kept")
    assert states == expected, others
    assert record.ledger()["ambiguous_roots"] == 2 * len(DIALECTS)


def test_a_url_without_a_server_is_named():
    with bind("127.0.0.1", 0) as bound:  # nobody listens
        address = url(bound, "/v1")
        with pytest.raises(ValueError, match=f"^{address}/models cannot be read: ConnectError"):
            check_gateway(f"{address}/")


def render_again(gateway, asked, match):
    chat = Chat(gateway._engine.tokenizer, asked.tools, gateway._template_kwargs)
    return chat.encode_messages(chat.render, asked.messages), True


def first_candidate(match):
    def planted(self, messages, named=None):
        found = match(self, messages, named)
        if found.candidates < 2:
            return found
        return dataclasses.replace(found, parent=self.nodes[found_number(self, messages)])

    def found_number(self, messages):
        from verlite.gateway.conversation import _digests

        digests = _digests(messages)
        return next(self._answered[d][0].number for d in digests[::-1] if d in self._answered)

    return planted


def without_tools(render):
    return lambda self, messages: render(
        self, [message for message in messages if message["role"] != "tool"] or messages
    )


@pytest.mark.parametrize(
    ("fault", "rules"),
    [
        ("a re-render in place of a bridge", {"turns", "Unicode", "parallel requests"}),
        ("merged siblings", {"retries"}),
        ("a lost tool result", {"tool results"}),
        ("a mask off by one turn", {"rows"}),
    ],
)
def test_a_planted_fault_is_found(monkeypatch, fault, rules):
    if fault == "a re-render in place of a bridge":
        monkeypatch.setattr(Gateway, "_encode_chat", render_again)
    elif fault == "merged siblings":
        monkeypatch.setattr(Session, "match", first_candidate(Session.match))
    elif fault == "a lost tool result":
        monkeypatch.setattr(Chat, "render", without_tools(Chat.render))
    states, others, _ = findings_of(inverted=fault == "a mask off by one turn")
    broken = {rule for (_, rule), state in states.items() if state == "broken"}
    assert rules <= broken, others
    if fault != "a re-render in place of a bridge":
        assert broken - {"rows"} <= rules, others
