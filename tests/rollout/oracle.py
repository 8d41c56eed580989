"""Oracle for generation: whole sequences in float64, one at a time."""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from tests.models import tiny_model
from verlite.rollout.types import Completion, Engine, Sampling
from verlite.weights.fingerprint import fingerprint


def float64_model(path: str) -> PreTrainedModel:
    """Return the model in double precision, with eager attention."""
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float64, attn_implementation="eager"
    )
    model.config._experts_implementation = "eager"  # the fused kernels do not support float64
    return model.eval()


def naive_log_probs(
    model: PreTrainedModel, prompt: Sequence[int], response: Sequence[int], sampling: Sampling
) -> list[float]:
    """Return each response token's log-prob under the filtered sampling distribution."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *response]])).logits[0]
    found = []
    for position, token in enumerate(response, len(prompt) - 1):
        row = logits[position] / (sampling.temperature or 1.0)
        if not sampling.greedy:
            row = naive_filter(row, sampling.top_k, sampling.top_p)
        found.append(row.log_softmax(-1)[token].item())
    return found


def naive_filter(row: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """Return logits [V] with -inf for removed tokens. Assumes that no two logits are equal."""
    order = row.argsort(descending=True).tolist()
    order = order[:top_k] if top_k > 0 else order
    probs = row[order].softmax(-1).tolist()
    kept = []
    total = 0.0
    for token, prob in zip(order, probs, strict=True):
        if total >= top_p:
            break
        kept.append(token)
        total += prob
    out = torch.full_like(row, -torch.inf)
    out[kept] = row[kept]
    return out


def naive_greedy(model: PreTrainedModel, prompt: Sequence[int], steps: int) -> list[int]:
    """Return `steps` tokens of greedy decoding."""
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(steps):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def model_with_two_ends(folder: Path, prompt: Sequence[int]) -> str:
    """Write a model and return its path.

    It has tied embeddings, shared KV heads, biases, a vocabulary larger than the tokenizer's that
    vLLM pads (130 to 192), and in generation_config.json sampling parameters and a second
    end-of-sequence id, which it samples greedily after `prompt`.
    """
    sizes = dict(hidden_size=128, vocab_size=130, initializer_range=0.05, tie_word_embeddings=True)
    path = tiny_model(folder, "qwen2", **sizes)
    greedy = naive_greedy(float64_model(path), prompt, 20)
    extra = next(i for i in greedy[3:] if i not in greedy[:3])
    (Path(path) / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [1, extra], "temperature": 0.3, "top_k": 2})
    )
    return path


def largest_gap(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Completion],
    sampling: Sampling,
) -> float:
    """Return the largest |log p_engine - log p_naive| over all tokens of the answers."""
    gaps = [
        abs(a - b)
        for prompt, answer in zip(prompts, answers, strict=True)
        for a, b in zip(
            answer.log_probs, naive_log_probs(model, prompt, answer.ids, sampling), strict=True
        )
    ]
    return max(gaps)


def ask(engine: Engine, prompts: Sequence[Sequence[int]], *samplings: Sampling) -> list[Completion]:
    """Generate for all prompts concurrently, with one sampling or one per prompt."""
    chosen = samplings if len(samplings) == len(prompts) else samplings * len(prompts)

    async def all_at_once() -> list[Completion]:
        return await asyncio.gather(
            *(engine.generate(p, s) for p, s in zip(prompts, chosen, strict=True))
        )

    return asyncio.run(all_at_once())


def weights_of(model: PreTrainedModel) -> list[tuple[str, torch.Tensor]]:
    """Return the weights as a trainer exports them: float32, tied weights once."""
    return [(name, parameter.detach().float()) for name, parameter in model.named_parameters()]


def load(engine: Engine, model: PreTrainedModel, version: int) -> None:
    """Load the model's weights with the correct fingerprint."""
    engine.load_weights(iter(weights_of(model)), version, fingerprint(weights_of(model)))


def moved(model: PreTrainedModel, size: float, seed: int = 0) -> PreTrainedModel:
    """Return a copy with each weight changed by a random amount, relative size `size`."""
    import copy

    generator = torch.Generator().manual_seed(seed)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(
                1 + size * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            )
    return other


def naive_swapped_log_probs(
    models: Sequence[PreTrainedModel],
    prompt: Sequence[int],
    answer: Completion,
    sampling: Sampling,
    *,
    keeps_cache: bool,
) -> list[float]:
    """Return each token's log-prob under the model of its weight version, which is its number in
    `models`.

    keeps_cache: earlier keys and values are those of the weights that computed them. Otherwise each
    token's context is computed with the token's own weights.
    """
    if not keeps_cache:
        by_version = [naive_log_probs(m, prompt, answer.ids, sampling) for m in models]
        versions = [v for v, count in answer.weight_versions for _ in range(count)]
        return [by_version[version][i] for i, version in enumerate(versions)]
    ids = [*prompt, *answer.ids]
    cache, seen, found = DynamicCache(), 0, []
    end = len(prompt) - 1
    for version, count in answer.weight_versions:
        end += count
        with torch.no_grad():
            logits = models[version](torch.tensor([ids[seen:end]]), past_key_values=cache).logits[0]
        for row, token in zip(logits[-count:], ids[end - count + 1 : end + 1], strict=True):
            row = row / (sampling.temperature or 1.0)
            found.append(row.log_softmax(-1)[token].item())
        seen = end
    return found


WAIT_S = 60.0


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


class Steps:
    """The steps of an engine from now on, counted.

    Before step n, `before[n]` is called on another thread. The step waits until that has sent a job
    to the engine, so the job runs directly after step n.
    """

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.count = 0
        self.before: dict[int, Callable[[], object]] = {}
        self.threads: list[threading.Thread] = []
        self.errors: list[BaseException] = []
        engine._call(self.attach)

    def attach(self, core: Any) -> None:
        self.step = core.step
        core.step = self.counted

    def counted(self) -> Any:
        self.count += 1
        action = self.before.pop(self.count, None)
        if action is not None:
            thread = threading.Thread(target=self.call, args=(action,))
            thread.start()
            self.threads.append(thread)
            until(lambda: not self.engine._jobs.empty())
        return self.step()

    def call(self, action: Callable[[], object]) -> None:
        try:
            action()
        except BaseException as error:
            self.errors.append(error)

    def end(self) -> None:
        """Wait for the actions, and leave the idle engine as it was."""
        for thread in self.threads:
            thread.join(WAIT_S)
        assert not self.engine._spans and not self.before
        assert self.engine._call(lambda core: core.pending()) == 0
        self.engine._call(lambda core: setattr(core, "step", self.step))
