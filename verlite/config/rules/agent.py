"""Samples of several turns."""

from collections.abc import Iterator

from verlite.config import plan
from verlite.config.problems import Problem
from verlite.config.rules.context import Context


def agent(context: Context) -> Iterator[Problem]:
    """Lengths, penalties and tools of samples with several turns."""
    config = context.config
    if not config.actor_rollout_ref.actor.state_masking:
        yield Problem(
            "actor_rollout_ref.actor.state_masking",
            False,
            "tool output is always left out of the loss",
            "Leave it out, or use true.",
        )
    if not plan.max_turns(config):
        return
    start = config.data.max_start_length
    prompt = config.data.max_prompt_length
    lengths_ok = context.ok("data.max_start_length", "data.max_prompt_length")
    if start is not None and start > prompt and lengths_ok:
        yield Problem(
            "data.max_start_length",
            start,
            f"is more than data.max_prompt_length={prompt}, which covers the first prompt and all "
            "turns before the last one",
            "Usual: half of it.",
        )
    if config.reward.overlong_buffer.enable:
        yield Problem(
            "reward.overlong_buffer.enable",
            True,
            "is for single turns: the length of an agent's sample depends on its tools",
            "Leave it out, or use algorithm.mask_truncated=true.",
        )
    if config.env.name == "search" and not plan.files_of(config.retriever.url):
        yield Problem(
            "retriever.url",
            config.retriever.url,
            "is empty; env.name=search needs a retriever",
            "Such as http://127.0.0.1:8000/retrieve.",
        )
