"""The memory of one role's engine, by running its passes on fake tensors.

Few layers are run, and give the memory of all exactly. Results are kept in the user's cache folder,
because each takes seconds.
"""

import hashlib
import json
import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import transformers
from tensordict import TensorDict
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

import verlite
from verlite.engine.checkpoint import local_part
from verlite.engine.folder import load_config
from verlite.engine.fsdp import Counts
from verlite.engine.micro import MicroBatch, MicroBatching
from verlite.engine.model import load_skeleton
from verlite.files import replace_file
from verlite.protocol.data import DataProto
from verlite.sizing.dry_engine import (
    BytesTracker,
    DryEngine,
    DryEngineSpec,
    Segment,
    decoder_layers,
    fake_ranks,
    kernels_of,
    resizes_noted,
)
from verlite.spec.roles import ModelSpec


@dataclass(frozen=True)
class PassRows:
    """The largest micro-batch of a pass: tokens of each of its samples.

    lengths: tokens per sample.
    response: tokens of a response, at most.
    prompts: number of each sample's prompt: samples with the same one have the tokens before the
        response in common. (): none have.
    several: the pass has more than one micro-batch.
    """

    lengths: tuple[int, ...]
    response: int
    several: bool = False
    prompts: tuple[int, ...] = ()


FEW = PassRows((16,), 8)
"""Less than any check of a model has. What such a pass needs is gathered weights and a chunk of
logits."""


@dataclass(frozen=True)
class Passes:
    """What one role runs.

    forward: log-probs or values. None: not run.
    update: forward and backward passes and the optimizer step. None: a frozen model.
    entropy: the update also computes entropies, and with "loss" their gradient.
    """

    forward: PassRows | None
    update: PassRows | None
    forward_entropy: bool = False
    sum_pi_squared: bool = False
    update_entropy: str = ""


@dataclass(frozen=True)
class RoleMemory:
    """Bytes of one role on one device.

    parameters: its shard of the parameters and buffers.
    optimizer: its shard of Adam's moments.
    check: peak of a pass over a few tokens, as at the start and before a weight sync, parameters
        and optimizer included.
    forward: peak of a forward pass, parameters and optimizer included; 0 if it is not run.
    update: peak of an update, likewise.
    host: activations in host memory at the peak, with enable_activation_offload.
    """

    parameters: int
    optimizer: int
    check: int
    forward: int
    update: int
    host: int = 0

    @property
    def resident(self) -> int:
        """Bytes between passes, without offload."""
        return self.parameters + self.optimizer


def measure(spec: DryEngineSpec, passes: Passes, whole: bool = False) -> RoleMemory:
    """Return the memory of a role.

    Args:
        spec: the engine.
        passes: what it runs.
        whole: run all layers instead of extrapolating from few.
    """
    number: int = load_config(spec.model).num_hidden_layers
    alike = are_alike(decoder_layers(load_skeleton(spec.model, spec.head)))
    if whole or number <= LONG or not alike:
        (parameters, optimizer, host), segments = _run(spec, passes)
        check, forward, update = map(_most, segments)
        return RoleMemory(parameters, optimizer, check, forward, update, host)
    short, long = (
        _run(replace(spec, model=replace(spec.model, override_config=override)), passes)
        for override in (with_layers(spec.model, n) for n in (SHORT, LONG))
    )
    parameters, optimizer, host = (
        few + (more - few) * (number - SHORT) for few, more in zip(short[0], long[0], strict=True)
    )
    check, forward, update = (
        peak(few, more, number) for few, more in zip(short[1], long[1], strict=True)
    )
    return RoleMemory(parameters, optimizer, check, forward, update, host)


def _most(segments: Sequence[Segment]) -> int:
    return max((segment.peak for segment in segments), default=0)


class _Given(MicroBatching):
    """Micro-batches of given rows."""

    def __init__(self, parts: list[list[int]]):
        super().__init__(size=1)
        object.__setattr__(self, "parts", parts)

    def split(self, rows: TensorDict, share_prefixes: bool = False) -> list[MicroBatch]:
        parts: list[list[int]] = self.parts  # type: ignore[attr-defined]
        with unset_fake_temporarily():
            return [MicroBatch(torch.tensor(part), share_prefixes) for part in parts]


def _run(
    spec: DryEngineSpec, passes: Passes
) -> tuple[tuple[int, int, int], tuple[list[Segment], ...]]:
    """Return the bytes of parameters, optimizer and offloaded activations, and the segments of the
    three passes."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    tracker = BytesTracker(mode)
    forward: list[Segment] = []
    update: list[Segment] = []
    kernels = kernels_of(spec.kind, tracker)
    with fake_ranks(spec.ranks), kernels, resizes_noted(tracker), tracker:
        engine = DryEngine(spec, tracker, mode)
        parameters = _bytes([*engine.model.parameters(), *engine.model.buffers()])
        optimizer = 0
        if engine.optimizer is not None:
            states = [list(state.values()) for state in engine.optimizer.state.values()]
            optimizer = _bytes([tensor for state in states for tensor in state])
        tracker.mark("build")
        tracker.take_segments()

        def run_forward(rows: PassRows, **options: bool) -> list[Segment]:
            batch, micro = rows_batch(rows)
            with mode:
                engine.forward(batch, micro, **options)
            tracker.mark("end")
            return tracker.take_segments()

        check = run_forward(FEW)
        if passes.forward is not None:
            forward = run_forward(
                passes.forward,
                with_entropy=passes.forward_entropy,
                with_sum_pi_squared=passes.sum_pi_squared,
            )
        if passes.update is not None:
            batch, micro = rows_batch(passes.update)
            objective = Objective(passes.update_entropy == "loss")
            with mode:
                engine.update(batch, micro, 1.0, objective, bool(passes.update_entropy))
            tracker.mark("step")
            update = tracker.take_segments()
    return (parameters, optimizer, engine.offloaded), (check, forward, update)


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


def rows_batch(rows: PassRows) -> tuple[DataProto, MicroBatching]:
    """Return a batch of one or two such micro-batches, and how to split it."""
    copies = 2 if rows.several else 1
    lengths = rows.lengths * copies
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
    ids = torch.arange(1, len(lengths) + 1)[:, None].repeat(1, width)
    if rows.prompts:
        ids[:, :-response] = -1 - torch.tensor(rows.prompts * copies)[:, None]
    floats = torch.zeros(trained.shape)
    columns = ("advantages", "old_log_probs", "rollout_log_probs", "returns", "values")
    batch = DataProto.from_dict(
        {
            "input_ids": mask * ids,
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


# From runs with few layers to the whole model
#
# Live bytes at a fixed point of a pass (the forward pass of layer i, the head, the backward pass of
# layer i, the optimizer step) are linear in the number of layers and in i, because all layers are
# alike. The first and the last layer differ from those between: the first has no layer before it to
# free, and FSDP prefetches nothing for it. So two runs, with 3 and 4 layers, determine everything:
#
#     first, last, head, step:   a + b L
#     layers 1 to L-2:           a + b L + c i
#
# The peak of a pass is the largest of these at the model's L.

SHORT, LONG = 3, 4
"""Layers of the two runs."""


def with_layers(model: ModelSpec, layers: int) -> dict[str, object]:
    """Return the override_config that gives a model this number of layers."""
    config = load_config(model)
    before = config.num_hidden_layers
    changes: dict[str, object] = {"num_hidden_layers": layers}
    for name, value in config.to_dict().items():
        if isinstance(value, list) and len(value) == before and hasattr(config, name):
            changes[name] = value[:layers]  # a value per layer, such as layer_types
    return {**model.override_config, **changes}


def are_alike(layers: Sequence[nn.Module]) -> bool:
    """Return whether all layers have the same parameters."""
    shapes = {
        tuple((name, p.shape, p.dtype) for name, p in layer.named_parameters()) for layer in layers
    }
    return len(shapes) == 1


def peak(short: list[Segment], long: list[Segment], layers: int) -> int:
    """Return the most live bytes of a pass through `layers` layers.

    Args:
        short: segments of the run with SHORT layers. long: of the run with LONG layers.
        layers: of the model, at least LONG.
    """
    few, more = _by_place(short), _by_place(long)
    return max((_peak(few[place], more[place], layers) for place in more), default=0)


def _by_place(segments: list[Segment]) -> dict[tuple[int, str], list[int]]:
    """Return the peaks of each micro-batch and kind of place, by the layer's number."""
    places: dict[tuple[int, str], dict[int, int]] = defaultdict(dict)
    micro_batch = 0
    for segment in segments:
        if segment.place == ("forward", 0):
            micro_batch += 1
        name, number = str(segment.place[0]), int((*segment.place, 0)[1])
        places[micro_batch, name][number] = segment.peak
    return {place: [peaks[i] for i in range(len(peaks))] for place, peaks in places.items()}


def _peak(short: list[int], long: list[int], layers: int) -> int:
    def line(at_short: int, at_long: int) -> int:
        return at_short + (at_long - at_short) * (layers - SHORT)

    ends = max(line(short[0], long[0]), line(short[-1], long[-1]))
    if len(long) == 1:
        return ends
    by_number = long[2] - long[1]
    second = line(short[1], long[1])
    return max(ends, second, second + by_number * (layers - 3))


# What was measured before

SOURCES = ("engine", "sizing", "algorithms/logprobs.py")
"""Parts of the package that the result depends on."""


def folder() -> Path:
    """Return the folder, by the XDG rules."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "verlite" / "plan"


class Measurer:
    """Measures engines, or returns what it measured before.

    use_cache: False neither reads nor writes the folder.
    measured: engines that were run; found: those whose result was kept.
    """

    def __init__(self, use_cache: bool = True, measure: Callable[..., RoleMemory] = measure):
        self.use_cache = use_cache
        self.measured = 0
        self.found = 0
        self._measure = measure
        self._known: dict[str, RoleMemory] = {}

    def __call__(self, spec: DryEngineSpec, passes: Passes) -> RoleMemory:
        """Return the memory of a role; see `measure.measure`."""
        key = key_of(spec, passes)
        if key in self._known:
            return self._known[key]
        memory = _read(key) if self.use_cache else None
        if memory is None:
            self.measured += 1
            memory = self._measure(spec, passes)
            if self.use_cache:
                _write(key, memory)
        else:
            self.found += 1
        self._known[key] = memory
        return memory

    def sentence(self) -> str:
        """Return how many engines were run, and where results are kept."""
        if not self.use_cache:
            return f"{self.measured} engines measured; nothing read from or written to the cache"
        return (
            f"{self.measured} engines measured, {self.found} read from the cache, {folder()} "
            "(--no-cache measures again)"
        )


def key_of(spec: DryEngineSpec, passes: Passes) -> str:
    """Return the hash of everything that a measurement depends on."""
    described = load_config(spec.model).to_dict()
    parts = {
        "config.json": described,
        "spec": asdict(spec) | {"model": asdict(spec.model) | {"path": ""}},
        "passes": asdict(passes),
        "versions": [verlite.__version__, torch.__version__, transformers.__version__],
        "sources": _sources(),
    }
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _sources() -> str:
    """Return a hash of the code that is run."""
    package = Path(verlite.__file__).parent
    digest = hashlib.sha256()
    for part in SOURCES:
        path = package / part
        for file in sorted(path.glob("*.py")) if path.is_dir() else [path]:
            digest.update(file.read_bytes())
    return digest.hexdigest()


def _read(key: str) -> RoleMemory | None:
    try:
        return RoleMemory(**json.loads((folder() / f"{key}.json").read_text()))
    except (OSError, ValueError, TypeError):
        return None


def _write(key: str, memory: RoleMemory) -> None:
    """Keep a result. A folder that cannot be written only means that nothing is kept."""
    try:
        folder().mkdir(parents=True, exist_ok=True)
        replace_file(folder() / f"{key}.json", json.dumps(asdict(memory)))
    except OSError:
        return
