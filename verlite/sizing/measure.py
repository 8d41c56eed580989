"""The memory of one role's engine, by running its passes on fake tensors."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from tensordict import TensorDict
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

from verlite.engine.checkpoint import local_part
from verlite.engine.folder import load_config
from verlite.engine.fsdp import Counts
from verlite.engine.micro import MicroBatching
from verlite.engine.model import load_skeleton
from verlite.protocol.data import DataProto
from verlite.sizing import layers
from verlite.sizing.dry_engine import DryEngine, EngineSpec, decoder_layers, fake_ranks, kernels_of
from verlite.sizing.tracker import Segment, Tracker, resizes_noted


@dataclass(frozen=True)
class Rows:
    """The largest micro-batch of a pass: tokens of each of its samples.

    lengths: tokens per sample.
    response: tokens of a response, at most.
    several: the pass has more than one micro-batch.
    """

    lengths: tuple[int, ...]
    response: int
    several: bool = False


@dataclass(frozen=True)
class Passes:
    """What one role runs.

    forward: log-probs or values. None: not run.
    update: forward and backward passes and the optimizer step. None: a frozen model.
    entropy: the update also computes entropies, and with "loss" their gradient.
    """

    forward: Rows | None
    update: Rows | None
    forward_entropy: bool = False
    sum_pi_squared: bool = False
    update_entropy: str = ""


@dataclass(frozen=True)
class RoleMemory:
    """Bytes of one role on one device.

    parameters: its shard of the parameters and buffers.
    optimizer: its shard of Adam's moments.
    forward: peak of a forward pass, parameters and optimizer included; 0 if it is not run.
    update: peak of an update, likewise.
    host: activations in host memory at the peak, with enable_activation_offload.
    """

    parameters: int
    optimizer: int
    forward: int
    update: int
    host: int = 0

    @property
    def resident(self) -> int:
        """Bytes between passes, without offload."""
        return self.parameters + self.optimizer


@dataclass(frozen=True)
class _Run:
    parameters: int
    optimizer: int
    host: int
    forward: list[Segment]
    update: list[Segment]


def measure(spec: EngineSpec, passes: Passes, whole: bool = False) -> RoleMemory:
    """Return the memory of a role.

    Args:
        spec: the engine.
        passes: what it runs.
        whole: run all layers instead of extrapolating from few.
    """
    number: int = load_config(spec.model).num_hidden_layers
    alike = layers.are_alike(decoder_layers(load_skeleton(spec.model, spec.head)))
    if whole or number <= layers.LONG or not alike:
        run = _run(spec, passes)
        return RoleMemory(
            run.parameters, run.optimizer, _most(run.forward), _most(run.update), run.host
        )
    short, long = (
        _run(
            replace(spec, model=replace(spec.model, override_config=override)),
            passes,
        )
        for override in (layers.with_layers(spec.model, n) for n in (layers.SHORT, layers.LONG))
    )

    def line(at_short: int, at_long: int) -> int:
        return at_short + (at_long - at_short) * (number - layers.SHORT)

    return RoleMemory(
        line(short.parameters, long.parameters),
        line(short.optimizer, long.optimizer),
        layers.peak(short.forward, long.forward, number) if passes.forward else 0,
        layers.peak(short.update, long.update, number) if passes.update else 0,
        line(short.host, long.host),
    )


def _most(segments: Sequence[Segment]) -> int:
    return max((segment.peak for segment in segments), default=0)


class _Given(MicroBatching):
    """Micro-batches of given rows."""

    def __init__(self, parts: list[list[int]]):
        super().__init__(size=1)
        object.__setattr__(self, "parts", parts)

    def split(self, rows: TensorDict) -> list[Tensor]:
        with unset_fake_temporarily():
            return [torch.tensor(part) for part in self.parts]  # type: ignore[attr-defined]


def _run(spec: EngineSpec, passes: Passes) -> _Run:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    tracker = Tracker(mode)
    forward: list[Segment] = []
    update: list[Segment] = []
    with fake_ranks(spec.ranks), kernels_of(spec.kind), resizes_noted(tracker), tracker:
        engine = DryEngine(spec, tracker, mode)
        parameters = _bytes([*engine.model.parameters(), *engine.model.buffers()])
        optimizer = 0
        if engine.optimizer is not None:
            states = [list(state.values()) for state in engine.optimizer.state.values()]
            optimizer = _bytes([tensor for state in states for tensor in state])
        tracker.mark("build")
        tracker.take_segments()
        if passes.forward is not None:
            batch, micro = rows_batch(passes.forward)
            with mode:
                engine.forward(
                    batch,
                    micro,
                    with_entropy=passes.forward_entropy,
                    with_sum_pi_squared=passes.sum_pi_squared,
                )
            tracker.mark("end")
            forward = tracker.take_segments()
        if passes.update is not None:
            batch, micro = rows_batch(passes.update)
            objective = Objective(passes.update_entropy == "loss")
            with mode:
                engine.update(batch, micro, 1.0, objective, bool(passes.update_entropy))
            tracker.mark("step")
            update = tracker.take_segments()
        host = engine.offloaded
    return _Run(parameters, optimizer, host, forward, update)


def _bytes(tensors: list[Tensor]) -> int:
    return sum(local_part(tensor).nbytes for tensor in tensors)


class Objective:
    """A loss over log-probs or values. Its own tensors are [b, R] in every algorithm, which is a
    thousandth of the activations."""

    def __init__(self, with_entropy: bool):
        self.with_entropy = with_entropy

    def __call__(
        self, rows: TensorDict, outputs: dict[str, Tensor], counts: Counts
    ) -> tuple[Tensor, dict[str, Tensor]]:
        values = outputs["values"] if "values" in outputs else outputs["log_probs"]
        loss = (values * rows["advantages"]).sum()
        if self.with_entropy:
            loss = loss - outputs["entropy"].sum()
        return loss, {}


def rows_batch(rows: Rows) -> tuple[DataProto, MicroBatching]:
    """Return a batch of one or two such micro-batches, and how to split it."""
    lengths = rows.lengths * (2 if rows.several else 1)
    width = max(lengths)
    response = min(rows.response, width - 1)
    mask = torch.zeros(len(lengths), width, dtype=torch.int64)
    for row, length in enumerate(lengths):
        mask[row, width - length :] = 1
    trained = mask[:, -response:].clone()
    trained[mask.sum(1) <= response, -response] = 0  # the first token has none before it
    for row, length in enumerate(lengths):
        if length <= response:
            trained[row, response - length] = 0
    floats = torch.zeros(trained.shape)
    columns = ("advantages", "old_log_probs", "rollout_log_probs", "returns", "values")
    batch = DataProto.from_dict(
        {
            "input_ids": mask,
            "attention_mask": mask,
            "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
            "response_mask": trained,
            "loss_mask": trained,
            **dict.fromkeys(columns, floats),
        }
    )
    part = list(range(len(rows.lengths)))
    parts = [part, [row + len(part) for row in part]] if rows.several else [part]
    return batch, _Given(parts)
