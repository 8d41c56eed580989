"""Sessions through the gateway of a real engine: rules of the conformance suite in all dialects,
several at once in each session.

    python -m tests.gateway.mixed [--engine vllm] [--sessions 1000] [--faults]

Of each session: no rule is broken, every token that the model wrote is trained once after what it
saw, the ledger accounts for every request, and the log-probs are those of float64 forward passes.
"""

import argparse
import asyncio
import dataclasses
import itertools
import json
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests.envs.test_chat import GOOD, tokenizer_of
from tests.models import tiny_model
from tests.rollout.oracle import float64_model
from verlite.contracts.gateway import Finding, Row, check_rows, mixed
from verlite.envs.chat import Chat
from verlite.gateway.agents import as_trajectory
from verlite.gateway.conversation import Match, Session, _digests
from verlite.gateway.server import Gateway, OpenSession
from verlite.rollout.batched import build_engine
from verlite.rollout.types import Sampling
from verlite.spec.roles import GenerationSpec, ModelSpec

LONGEST = 1200
AT_ONCE = 32
"""Sessions."""


def model_in(folder: Path) -> str:
    """Return a folder with a random model of bytes, whose template leaves out earlier thoughts."""
    tokens = tokenizer_of(GOOD["qwen3"])
    end = tokens.eos_token_id
    sizes = {"vocab_size": len(tokens), "hidden_size": 128, "eos_token_id": end}
    tiny_model(folder, initializer_range=0.05, **sizes)
    tokens.save_pretrained(folder)
    return str(folder)


class Logged:
    """An engine, and what it was asked and answered."""

    def __init__(self, engine):
        self._engine = engine
        self.answers: list[tuple[list[int], list[int]]] = []

    def __getattr__(self, name):
        return getattr(self._engine, name)

    async def generate(self, prompt_ids, sampling, so_far=None, name=None):
        completion = await self._engine.generate(prompt_ids, sampling, so_far, name)
        self.answers.append((list(prompt_ids), completion.ids))
        return completion


@dataclasses.dataclass
class Played:
    session: OpenSession
    findings: list[Finding]


def rows_of(session: OpenSession, inverted: bool = False) -> list[Row]:
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


async def play(engine, sessions: int, seed: int = 0, inverted: bool = False) -> list[Played]:
    """Play sessions, `AT_ONCE` at a time."""
    places = asyncio.Semaphore(AT_ONCE)
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(AT_ONCE + 8))

    async def one(gateway, number):
        async with places:
            session = gateway.open(Sampling(max_tokens=100, seed=number))
            url, key = session.base_url, session.token
            findings, turns = await asyncio.to_thread(mixed, url, key, number)
            gateway.close(session)
            rows = await asyncio.to_thread(rows_of, session, inverted)
            return Played(session, [*findings, check_rows(turns, rows)])

    async with Gateway(engine, LONGEST) as gateway:
        return await asyncio.gather(*(one(gateway, seed + number) for number in range(sessions)))


def gaps_of(session: OpenSession, model) -> list[float]:
    """Return the difference of each log-prob from that of a forward pass over its branch."""
    gaps = []
    for path, known in session.record.branches():
        ids = torch.tensor([path[-1].context])
        with torch.no_grad():
            log_probs = model(ids).logits[0].log_softmax(-1)
        for node in path[known:]:
            begin = len(node.prompt)
            exact = log_probs[range(begin - 1, begin - 1 + len(node.sampled)), node.sampled]
            gaps += (exact - torch.tensor(node.log_probs)).abs().tolist()
    return gaps


def account(played: list[Played], engine: Logged, model) -> dict:
    """Return what was seen. Raises AssertionError."""
    findings = [finding for one in played for finding in one.findings]
    broken = [finding for finding in findings if finding.state == "broken"]
    ledger: Counter[str] = Counter()
    for one in played:
        ledger.update(one.session.ledger())
    nodes = [node for one in played for node in one.session.record.nodes if node.sampled]
    assert ledger["requests"] == ledger["answered"] + ledger["aborted"]
    # Both sides may know an answer that the other does not: one that was complete when its client
    # left. What is recorded is what the engine said, token for token.
    recorded = Counter((tuple(node.prompt), tuple(node.sampled)) for node in nodes)
    said = Counter((tuple(prompt), tuple(ids)) for prompt, ids in engine.answers)
    assert not recorded - said, "recorded tokens that the engine did not sample"
    assert (said - recorded).total() <= ledger["aborted"]
    gaps = [gap for one in played for gap in gaps_of(one.session, model)]
    assert len(gaps) == sum(len(node.sampled) for node in nodes)
    return {
        "sessions": len(played),
        "ledger": dict(ledger),
        "rules": dict(Counter(f"{one.rule}: {one.state}" for one in findings)),
        "broken": [dataclasses.asdict(finding) for finding in broken[:5]],
        "broken_rules": len(broken),
        "sampled_tokens": len(gaps),
        "largest_gap": max(gaps),
    }


# Faults


def _render_again(gateway, asked, match):
    chat = Chat(gateway._engine.tokenizer, asked.tools, gateway._template_kwargs)
    return chat.encode_messages(chat.render, asked.messages), True


def _first_candidate(match):
    def planted(self, messages, named=None):
        found = match(self, messages, named)
        if found.candidates < 2:
            return found
        digests = _digests(messages)
        first = next(self._answered[d][0] for d in digests[::-1] if d in self._answered)
        return dataclasses.replace(found, parent=first)

    return planted


def _without_tools(render):
    return lambda self, messages: render(
        self, [message for message in messages if message["role"] != "tool"] or messages
    )


def _bridge_rewritten(encode):
    """Of a history that the template writes in another way, only the new messages are given."""

    def planted(gateway, asked, match):
        given, rewritten = encode(gateway, asked, match)
        if not rewritten:
            return given, rewritten
        known = dataclasses.replace(asked, messages=asked.messages[match.known - 1 :])
        return encode(gateway, known, Match(None, 0, 0))[0], True

    return planted


MASK = "a mask off by one turn"
FAULTS = {
    "a re-render in place of a bridge": (Gateway, "_encode_chat", lambda _: _render_again),
    "merged siblings": (Session, "match", _first_candidate),
    "a lost tool result": (Chat, "render", _without_tools),
    "a rewritten history that is bridged": (Gateway, "_encode_chat", _bridge_rewritten),
    MASK: None,
}


@contextmanager
def planted(fault: str):
    """Plant a fault in the gateway meanwhile; MASK is one of `rows_of`."""
    with pytest.MonkeyPatch.context() as patch:
        if FAULTS[fault]:
            owner, name, made = FAULTS[fault]
            patch.setattr(owner, name, made(getattr(owner, name)))
        yield


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", default="vllm", choices=["vllm", "hf"])
    parser.add_argument("--sessions", type=int, default=1000)
    parser.add_argument("--faults", type=int, default=0, help="sessions with each planted fault")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = model_in(Path(folder))
        spec = GenerationSpec(enforce_eager=True, max_num_seqs=128)
        cpu = torch.device("cpu")
        engine = build_engine(
            args.engine, ModelSpec(path=path), spec, LONGEST, cpu, 0, pretrained=True
        )
        model = float64_model(path)
        logged, began = Logged(engine), time.monotonic()
        played = asyncio.run(play(logged, args.sessions))
        print(f"{time.monotonic() - began:.0f} s", flush=True)
        print(json.dumps(account(played, logged, model), indent=1), flush=True)
        for fault in FAULTS if args.faults else ():
            with planted(fault):
                played = asyncio.run(play(engine, args.faults, inverted=fault == MASK))
            broken = [f for one in played for f in one.findings if f.state == "broken"]
            print(f"{fault}: {Counter(finding.rule for finding in broken)}", flush=True)
        engine.close()


if __name__ == "__main__":
    main()
