"""Direct preference optimization: Rafailov et al. 2023, https://arxiv.org/abs/2305.18290.

A row has two examples with the same prompt: the better response, then the worse one. The reference
is the model with which the run starts.
"""

from functools import partial

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.nn.functional import logsigmoid

from verlite.config import dpo
from verlite.config.dpo import DPOConfig
from verlite.engine.fsdp import Counts, TrainEngine
from verlite.sft.data import Example
from verlite.sft.preferences import columns, row_examples
from verlite.sft.run import Task
from verlite.sft.train import log_prob_sums, micro_batching
from verlite.trainer.preflight import DPO


def dpo_loss(
    rows: TensorDict, outputs: dict[str, Tensor], counts: Counts, beta: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return this micro-batch's part of the mean over pairs, and of the metrics of `pair_metrics`.

    rows: ref_log_prob_sums [2k] of k pairs, better and worse response in turns.
    """
    sums = (outputs["log_probs"] * rows["response_mask"]).double().sum(1)
    pairs = counts.sequences / 2
    metrics = {
        name: values.sum() / pairs
        for name, values in pair_metrics(beta * (sums - rows["ref_log_prob_sums"])).items()
    }
    tokens = {"tokens": rows["response_mask"].sum()}
    return metrics.pop("loss"), metrics | tokens


def pair_metrics(rewards: Tensor) -> dict[str, Tensor]:
    """Return loss and metrics of each pair [k].

    The loss is -log sigmoid(r_chosen - r_rejected) with r = beta * log(p / p_ref): equation 7 of
    the paper.

    rewards: [2k], better and worse response in turns.
    """
    chosen, rejected = rewards[0::2], rewards[1::2]
    margin = chosen - rejected
    return {
        "loss": -logsigmoid(margin),
        "rewards/accuracy": (margin > 0).double(),
        "rewards/margin": margin,
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
    }


def judge(
    config: DPOConfig, examples: list[Example], sums: list[float], references: list[float]
) -> tuple[dict[str, float], list[float]]:
    """Return the means of `pair_metrics`, and the reward of each example."""
    change = torch.tensor(sums, dtype=torch.float64) - torch.tensor(references, dtype=torch.float64)
    rewards = config.beta * change
    metrics = {name: float(values.mean()) for name, values in pair_metrics(rewards).items()}
    return metrics, rewards.tolist()


def reference(engine: TrainEngine, config: DPOConfig, examples: list[Example]) -> list[float]:
    """Return the sum of log-probs of each example under the engine's weights."""
    return log_prob_sums(engine, examples, micro_batching(config))


TASK = Task(
    command=dpo.DPO,
    kind=DPO,
    columns=columns,
    examples_of=row_examples,
    sources=("chosen", "rejected"),
    loss=lambda config: partial(dpo_loss, beta=config.beta),
    judge=judge,
    reference=reference,
)
"""`verlite.main_dpo`."""
