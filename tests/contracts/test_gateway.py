"""The conformance suite finds planted faults in verlite's own gateway, which keeps all rules."""

import asyncio
import itertools
import random

import pytest

from tests.gateway.mixed import FAULTS, MASK, planted, rows_of
from tests.gateway.test_gateway import tokenizer
from verlite.contracts.gateway import DIALECTS, RULES, check_gateway
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


def findings_of(inverted=False, template="qwen3"):
    """Return the state of each rule by (dialect, rule), and the details of those that are not
    kept."""

    async def talk():
        async with Gateway(Babbler(tokenizer(template)), 4000) as gateway:
            session = gateway.open(Sampling(max_tokens=100))
            found = await asyncio.to_thread(
                check_gateway, session.base_url, session.token, lambda: rows_of(session, inverted)
            )
            return found, session.record

    found, record = asyncio.run(asyncio.wait_for(talk(), 600))
    states = {(finding.dialect, finding.rule): finding.state for finding in found}
    return states, [finding for finding in found if finding.state != "kept"], record


def test_verlites_gateway_keeps_every_rule_in_every_dialect():
    states, others, record = findings_of()
    tokens = [("completions", "tokens"), ("generate", "tokens"), ("all", "rows")]
    pairs = [*itertools.product(DIALECTS, RULES), *tokens]
    counted = [pair for pair in pairs if pair[1] != "counts" or pair[0] == "messages"]
    expected = dict.fromkeys(counted, "kept")
    assert states == expected, others
    assert record.ledger()["ambiguous_roots"] >= 2 * len(DIALECTS)


def test_a_url_without_a_server_is_named():
    with bind("127.0.0.1", 0) as bound:  # nobody listens
        address = url(bound, "/v1")
        with pytest.raises(ValueError, match=f"^{address}/models cannot be read: ConnectError"):
            check_gateway(f"{address}/")


RULES_OF_FAULTS = {
    "a re-render in place of a bridge": {"turns", "Unicode", "parallel requests"},
    "merged siblings": {"retries"},
    "a lost tool result": {"tool results"},
    "a rewritten history that is bridged": {"thoughts"},
    MASK: {"rows"},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault):
    rules = RULES_OF_FAULTS[fault]
    with planted(fault):
        states, others, _ = findings_of(inverted=fault == MASK)
    broken = {rule for (_, rule), state in states.items() if state == "broken"}
    assert rules <= broken, others
    if fault in ("merged siblings", "a lost tool result"):
        assert broken - {"rows", "thoughts"} <= rules, others
