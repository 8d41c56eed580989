"""A contract test for environments of the package `verifiers`: run episodes as training does, with
an engine that says a text of the user's."""

import asyncio
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from verlite.gateway.agents import Agents
from verlite.gateway.program import ProgramError
from verlite.gateway.verifiers import tasks
from verlite.rollout.types import Completion, Sampling, Status, Task
from verlite.spec.roles import AgentSpec

EPISODES = 2
"""Tasks that are tried."""
EPISODE_S = 300.0
"""How long an episode may take here."""
LONGEST = 100_000
"""Tokens of a context, which are bytes here."""
SAYS = ("42",)
_TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function }}{% endfor %}"
    "{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@dataclass
class Speaker:
    """An engine that says the same texts in each conversation, the last one again and again."""

    turns: Sequence[str]
    version: int = 0
    last_step: float = 0.0
    silent: bool = False
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    said: list[tuple[list[int], list[int]]] = field(default_factory=list)
    tokenizer: Any = field(default_factory=lambda: _tokenizer())

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, so_far: Any = None, name: Any = None
    ) -> Completion:
        self.asked.set()
        if self.silent:
            await asyncio.Event().wait()
        earlier = sum(token == self.tokenizer.eos_token_id for token in prompt_ids)
        text = self.turns[min(earlier, len(self.turns) - 1)]
        ids = [*self.tokenizer.encode(text), self.tokenizer.eos_token_id][: sampling.max_tokens]
        self.said.append((list(prompt_ids), ids))
        return Completion(ids, [-1.0] * len(ids), "stop", [(0, len(ids))])

    def running(self) -> dict[Any, Completion]:
        return {}


def _tokenizer() -> Any:
    """Return a tokenizer with a token per byte, and a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_only = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bytes_only.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytes_only, eos_token="<eos>")
    tokenizer.chat_template = _TEMPLATE
    return tokenizer


def check_verifiers(
    name: str, python: str, kwargs: dict[str, Any], script: Sequence[str] = ()
) -> tuple[list[str], list[str]]:
    """Return (what was seen, promises that are broken). An environment must

    - be loaded by its Python, and have tasks;
    - end each episode with a finite score;
    - ask through the session that it is given, so that the model's tokens are trained as they are;
    - answer when a sample is cancelled, and serve the next one.

    Args:
        name: agent.verifiers.
        python: agent.python.
        kwargs: agent.kwargs.
        script: what the model says, turn by turn.
    """
    spec = AgentSpec(None, name, python, kwargs, timeout_s=EPISODE_S)
    try:
        rows = tasks(spec, EPISODES)
    except ProgramError as error:
        return [], [str(error)]
    if not rows:
        return [], ["the taskset has no task"]
    return asyncio.run(_try(spec, rows, script or SAYS))


async def _try(
    spec: AgentSpec, rows: list[dict[str, Any]], script: Sequence[str]
) -> tuple[list[str], list[str]]:
    seen, broken = [], []
    speaker: Any = Speaker(script)  # it has what the gateway uses of an engine
    jobs = [Task(row, [0], Sampling(max_tokens=LONGEST)) for row in rows]
    async with Agents(spec, speaker, LONGEST, {}, os.getcwd()) as agents:
        for number, job in enumerate(jobs):
            began = time.monotonic()
            speaker.said.clear()
            one = await agents.sample(job)
            if one.status is Status.ERROR or one.score is None:
                broken.append(f"task {number}: {one.error}")
                break
            pairs = zip(one.response_ids, one.response_mask, strict=True)
            trained = [token for token, mask in pairs if mask]
            if trained != [token for _, ids in speaker.said for token in ids]:
                broken.append(f"task {number}: the trained tokens are not those of the model")
            session = one.session
            seen.append(
                f"task {number}: score {one.score.score}, {one.turns} turns, {session['branches']} "
                f"branches ({session['rewritten_roots']} rewritten by the chat template), "
                f"{time.monotonic() - began:.1f} s"
            )
        if not broken:
            broken += await _cancelled(agents, speaker, jobs[0])
    return seen, broken


async def _cancelled(agents: Agents, speaker: Speaker, job: Task) -> list[str]:
    """Cancel a sample while it waits for the model, and run another one."""
    assert agents.environment is not None
    starts = agents.environment.starts
    speaker.silent = True
    speaker.asked.clear()
    waiting = asyncio.ensure_future(agents.sample(job))
    asked = asyncio.ensure_future(speaker.asked.wait())
    await asyncio.wait((waiting, asked), return_when=asyncio.FIRST_COMPLETED)
    asked.cancel()
    waiting.cancel()
    await asyncio.wait((waiting,))
    await agents.environment.settled()
    speaker.silent = False
    after = await agents.sample(job)
    if agents.environment.starts != starts:
        return ["a cancelled sample is not answered: the process hangs, and is started again"]
    return [f"after a cancelled sample: {after.error}"] if after.error else []
