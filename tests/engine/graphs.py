"""Samples of agent programs whose conversations branch, and a reference that knows no rows."""

import math
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.engine.batches import engine
from tests.engine.programs import SCALE, TEMPERATURE, catch_gradients
from verlite.config.compile import policy_loss_spec
from verlite.config.schema import ActorConfig, Config
from verlite.gateway.agents import as_trajectory
from verlite.gateway.conversation import Match, Node, Session
from verlite.protocol.data import DataProto
from verlite.rewards.result import RewardResult
from verlite.spec.correction import RolloutCorrection
from verlite.spec.roles import Micro, Updates
from verlite.workers.actor import ActorWorker, policy_objective
from verlite.workers.rollout import DecodedResponse, as_columns
from verlite.workers.training import StepRows

GRAPHS = (
    ((None, 2, 2), (0, 1, 1), (0, 1, 2), (None, 1, 1)),  # a retry, and a sub-agent
    ((None, 3, 2), (0, 2, 3)),  # a linear conversation
    ((None, 2, 1), (None, 3, 4), (1, 1, 1), (0, 2, 2), (3, 1, 1), (3, 1, 3)),
)
"""Of each sample the requests in order: (number of the parent, tokens given, tokens sampled)."""
ADVANTAGES = (0.7, -1.3, 0.4)


def session_of(graph: Any, first: int = 3) -> Session:
    """Return a session with these requests. Its tokens are consecutive numbers, its log-probs
    minus a tenth of them, and request i is sampled by version i."""
    session = Session()
    tokens = iter(range(first, 1000))
    for parent, given, sampled in graph:
        found = Match(None if parent is None else session.nodes[parent], 1, int(parent is not None))
        node = session.begin(found, [next(tokens) for _ in range(given)])
        ids = [next(tokens) for _ in range(sampled)]
        spans = [(node.number, sampled)]
        session.answer(node, ids, [-token / 10 for token in ids], spans, "stop", ())
    return session


def sessions() -> list[Session]:
    return [session_of(graph, 3 + 40 * i) for i, graph in enumerate(GRAPHS)]


def trajectory_of(session: Session, credit: str = "graph") -> Any:
    opened: Any = SimpleNamespace(record=session, engine_seconds=0.0, ledger=session.ledger)
    return as_trajectory(opened, [1], credit)


def batch(credit: str) -> DataProto:
    """Return the samples as the driver sends them to an actor: one row each."""
    trajectories = [trajectory_of(session, credit) for session in sessions()]
    results = {row: RewardResult(1.0) for row in range(len(trajectories))}
    decoded = [DecodedResponse()] * len(trajectories)
    rows = as_columns(trajectories, decoded, results, 0.0, True, True)
    columns = rows.non_tensor_batch
    names = ("prompt_ids", "response_ids", "response_mask", "rollout_log_probs", "branches")
    rows = rows.select(non_tensor_batch_keys=[*names, "credit"])
    numbers = torch.zeros(len(rows), 1, dtype=torch.int64)
    rows = rows.with_batch(
        advantages=torch.tensor(ADVANTAGES)[:, None],
        trained_tokens=rows.batch["sampled_tokens"],
        mini_batch_index=numbers,
        entropy_sums=torch.zeros(len(rows)),
    )
    return rows.with_non_tensor(loss_mask=columns["response_mask"]).with_meta(updates=1, step=1)


def factor(node: Node, session: Session, credit: str) -> float:
    """Return the factor of the advantage on a request's tokens, worked out by hand for GRAPHS."""
    if credit == "0.5":
        return 0.5 ** (len(session.nodes) - 1 - node.number)
    if credit == "graph":
        return 1.0
    # Of each branch (requests that are new in it, their tokens). Tokens of a sample: 6, 5, 12.
    branches = {
        4: [((0, 1), 3), ((2,), 2), ((3,), 1)],
        2: [((0, 1), 5)],
        6: [((1, 2), 5), ((0, 3, 4), 4), ((5,), 3)],
    }[len(session.nodes)]
    total = sum(count for _, count in branches)
    (count,) = [count for own, count in branches if node.number in own]
    return total / len(branches) / count


def closed_form(path: str, mode: str, credit: str) -> tuple[list[list[float]], dict[str, Tensor]]:
    """Return the log-probs of every request, and the gradient of the samples' loss in float64: each
    request once, after its own context."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).eval()
    samples = sessions()
    tokens = [sum(len(node.sampled) for node in session.nodes) for session in samples]
    loss = torch.zeros((), dtype=torch.float64)
    log_probs = []
    for session, own, advantage in zip(samples, tokens, ADVANTAGES, strict=True):
        weight = {
            "token-mean": 1 / sum(tokens),
            "token-sum": 1.0,
            "seq-mean-token-sum": 1 / len(samples),
            "seq-mean-token-mean": 1 / len(samples) / own,
            "seq-mean-token-sum-norm": 1 / len(samples) / SCALE,
        }[mode]
        for node in session.nodes:
            ids = torch.tensor(node.context)
            logits = model(ids[None]).logits[0, -len(node.sampled) - 1 : -1] / TEMPERATURE
            found = torch.log_softmax(logits, -1).gather(1, ids[-len(node.sampled) :, None])
            log_probs.append(found.flatten().tolist())
            loss = loss - weight * advantage * factor(node, session, credit) * found.sum()
    loss.backward()
    return log_probs, {name: p.grad for name, p in model.named_parameters()}


def worker_of(path: str, mode: str, micro: Micro, **settings: Any) -> Any:
    """Return an actor whose loss is -A log p, and the gradients of its next steps."""
    config = Config()
    config.actor_rollout_ref.actor = ActorConfig(loss_agg_mode=mode, entropy_coeff=0.0)
    plan: Any = SimpleNamespace(
        clip_low=0.2, clip_high=0.2, loss_scale=SCALE, loss_mode="gpg", correction=None
    )
    plan.correction = RolloutCorrection()
    loss = policy_loss_spec(config, plan)
    worker: Any = ActorWorker.__new__(ActorWorker)
    worker.engine = engine(path, train=True, lr=0.0, grad_clip=math.inf, **settings)
    worker.spec = SimpleNamespace(
        loss=loss,
        updates=Updates(3, 3, 1, 1, micro, False, mode),
        temperature=TEMPERATURE,
        calculate_entropy=False,
        run_dir="run",
        log_probs=SimpleNamespace(micro=micro, needs_sum_pi_squared=False),
    )
    worker._spec = SimpleNamespace(device_kind="cpu")
    worker._objective = policy_objective(loss)
    worker.rank_rows, worker.all_rows = StepRows(), StepRows()
    return worker, catch_gradients(worker.engine)


def step(path: str, case: dict[str, Any], **settings: Any) -> tuple[Any, dict[str, Tensor]]:
    """Return the log-probs of a step's samples by row, and the gradient of its update.

    case: mode, credit, micro, and with `parts` gradients are accumulated row by row before the
    update. With two ranks the second one has rows 1 and 2.
    """
    worker, caught = worker_of(path, case["mode"], case["micro"], **settings)
    rows = batch(case["credit"])
    if dist.get_world_size() == 2:
        rows = rows[[0]] if dist.get_rank() == 0 else rows[[1, 2]]
    found = worker.log_probs(rows)
    for number in range(2 if case.get("parts") else 0):
        part = [number] if number < len(rows) else []
        worker.accumulate(rows[part].with_meta(step=1, part=number))
    worker.update(rows)
    return found, caught
