"""Predict the time of an update on a GPU from its operators, without a GPU.

python recipes/benchmark/operators.py [--card H100|H200] [--keep]

The real TrainEngine runs an update on tensors that have a shape and no values, as rank 0 of 8, with
3 and with 4 layers; the rest is linear in the layers. Each operator takes the time of its FLOPs or
of the bytes that it reads and writes, whichever is more; the update takes the sum, or the time in
which the host can start its operators, whichever is more. Rates are those of CARDS. Communication
between ranks is taken to be hidden behind products, which it is not with few tokens.
"""

import argparse
import json
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

from gpu import SHAPES
from report import keep
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from verlite.algorithms import logprobs
from verlite.sizing.dry_engine import (
    BytesTracker,
    DryEngine,
    DryEngineSpec,
    fake_ranks,
    kernels_of,
)
from verlite.sizing.facts import model_facts
from verlite.sizing.measure import LONG, SHORT, Objective, Passes, PassRows, measure, rows_batch
from verlite.spec.roles import FSDPSpec, ModelSpec, OptimSpec

CARDS = {
    "H100": {"peak": 989e12, "products": 620e12, "attention": 350e12, "bytes": 2.3e12},
    "H200": {"peak": 989e12, "products": 640e12, "attention": 350e12, "bytes": 3.2e12},
}
"""Peak bfloat16 FLOP/s, by which MFU divides; FLOP/s of matrix products and of attention, and
bytes/s, that kernels reach: the H200's such that gpu.py's four updates there took 0.97 to 1.12 of
what is predicted, the H100's by the data sheets' ratio."""
HOST = 8e-6
"""Assumed: seconds in which the host starts an operator."""
WATCHED = 10e-6
"""Assumed: seconds more for an operator of a layer that keeps some outputs: Python sees each."""
MODELS = {"1.5B": SHAPES["1.5b"], "7B": SHAPES["7b-width"] | {"num_hidden_layers": 28}}
SAMPLES = {"2k": (2048,), "16k": (2048,) * 8, "32k": (32768,)}
PROMPT = 512
VARIANTS: dict[str, tuple[object, bool]] = {
    "before": (True, False),
    "head fused": (True, True),
    "attention kept": ("attention", True),
    "products kept": ("products", True),
    "all kept": (False, True),
}
"""enable_gradient_checkpointing, and whether the head's work on logits is one kernel."""
UNCOUNTED = (
    "view _unsafe_view t transpose permute expand slice select unsqueeze squeeze split detach "
    "alias split_with_sizes as_strided unbind empty empty_like new_empty empty_strided "
    "new_empty_strided _reshape_alias reshape narrow lift_fresh set_ record_stream resize_ "
    "is_pinned chunk device"
).split()
"""Operators that start no kernel."""


@dataclass
class Count:
    """What an update needs: kernels, seconds of host and device, FLOPs, bytes of kernels without
    FLOPs."""

    kernels: float = 0
    host: float = 0.0
    flops: float = 0.0
    moved: float = 0.0
    seconds: float = 0.0

    def line(self, more: "Count", layers: int) -> "Count":
        """Return the count of so many layers, from those of SHORT (this one) and LONG."""
        few, many = vars(self), vars(more)
        return Count(**{k: few[k] + (many[k] - few[k]) * (layers - SHORT) for k in few})


def _bytes(name: str, args: Any, kwargs: Any, out: Any) -> float:
    """Return the bytes that an operator reads and writes."""
    if name in ("gather", "embedding"):
        return 2 * float(out.nbytes)
    if name == "scatter_":
        return 2 * float(args[3].nbytes)
    if name == "logsumexp":  # maximum, difference, exponential, sum
        return 6 * float(args[0].nbytes)
    return sum(t.nbytes for t in tree_leaves((args, kwargs, out)) if isinstance(t, Tensor))


class Recorder(TorchDispatchMode):
    """Counts every operator on local tensors."""

    def __init__(
        self, mode: FakeTensorMode, card: dict[str, float], lengths: tuple[int, ...], extra: float
    ):
        super().__init__()  # type: ignore[no-untyped-call]
        self.mode, self.card, self.lengths, self.extra = mode, card, lengths, extra
        self.count: Count | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.split("::")[-1]
        is_counted = name not in UNCOUNTED and "c10d" not in func._schema.name
        if self.count is not None and is_counted and self._is_own(args, kwargs, out):
            self.add(_bytes(name, args, kwargs, out), self._flops(func, name, args, kwargs, out))
        return out

    def _is_own(self, *values: Any) -> bool:
        """Return False for tensors with which DTensor infers shapes, once in a process."""
        fakes = [value for value in tree_leaves(values) if isinstance(value, FakeTensor)]
        return all(fake.fake_mode is self.mode for fake in fakes)

    def _flops(self, func: Any, name: str, args: Any, kwargs: Any, out: Any) -> tuple[float, str]:
        if "varlen_attn" in name:
            q = args[1] if "backward" in name else args[0]
            pairs = sum(length * length / 2 for length in self.lengths)
            factor = 10 if "backward" in name else 4
            return factor * pairs * q.shape[1] * q.shape[2], "attention"
        packet = func._overloadpacket
        if packet in flop_registry:
            return flop_registry[packet](*args, **(kwargs or {}), out_val=out), "products"
        return 0.0, ""

    def add(self, moved: float, work: tuple[float, str] = (0.0, ""), kernels: int = 1) -> None:
        assert self.count is not None
        flops, kind = work
        self.count.kernels += kernels
        self.count.host += kernels * (HOST + self.extra)
        self.count.flops += flops
        self.count.moved += 0 if kind else moved
        at_rate = flops / self.card[kind] if kind else 0.0
        self.count.seconds += max(at_rate, moved / self.card["bytes"])

    @contextmanager
    def paused(self) -> Iterator[Count]:
        assert self.count is not None
        held, self.count = self.count, None
        yield held
        self.count = held

    # The head's kernels where it is compiled

    def fused(self, function: Any, chunk: int, logits: Tensor, *arguments: Any) -> Any:
        with self.paused():
            out = function(logits, *arguments)
        self.add(logits.nbytes + sum(t.nbytes for t in tree_leaves(out)))
        return out

    def add_product(self, total: Tensor, left: Tensor, right: Tensor) -> None:
        flops = 2 * left.shape[0] * left.shape[1] * right.shape[1]
        self.add(left.nbytes + right.nbytes + 2 * total.nbytes, (flops, "products"))


def counted(spec: DryEngineSpec, rows: PassRows, card: dict[str, float], fused: bool) -> Count:
    """Count an update of one micro-batch."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    keeps_some = isinstance(spec.model.enable_gradient_checkpointing, str)
    recorder = Recorder(mode, card, rows.lengths, WATCHED if keeps_some else 0.0)
    batch, micro = rows_batch(rows)
    with ExitStack() as stack:
        tracker = BytesTracker(mode)
        eager = {"_fused": logprobs._fused, "_add_product": logprobs._add_product}
        own = {"_fused": recorder.fused, "_add_product": recorder.add_product}
        for context in (fake_ranks(spec.ranks), kernels_of(spec.kind, tracker), recorder):
            stack.enter_context(context)
        engine = DryEngine(spec, tracker, mode)
        stack.enter_context(mock.patch.multiple(logprobs, **(own if fused else eager)))
        recorder.count = Count()
        with mode:
            engine.update(batch, micro, 1.0, Objective(with_entropy=False))
    return recorder.count


def predicted(
    shape: dict[str, Any],
    lengths: tuple[int, ...],
    response: int,
    variant: str,
    card: dict[str, float],
    ranks: int = 8,
) -> dict[str, float]:
    """Return milliseconds, MFU, kernels and peak memory of an update of one micro-batch."""
    kept, fused = VARIANTS[variant]
    with tempfile.TemporaryDirectory() as folder:
        described = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", **shape}
        Path(folder, "config.json").write_text(json.dumps(described))
        model = ModelSpec(path=folder, enable_gradient_checkpointing=kept)  # type: ignore[arg-type]
        spec = DryEngineSpec(model, FSDPSpec(), OptimSpec(), "lm", ranks, 1, "cuda", "bfloat16")
        rows = PassRows(lengths, response)
        few, more = (
            counted(replace(spec, model=replace(model, override_config=layers)), rows, card, fused)
            for layers in ({"num_hidden_layers": n} for n in (SHORT, LONG))
        )
        facts = model_facts(model)
        peak = measure(spec, Passes(None, rows)).update
    total = few.line(more, shape["num_hidden_layers"])
    needed = sum(length * facts.update_flops(length, False) for length in lengths)
    seconds = max(total.seconds, total.host)
    return {
        "kernels": round(total.kernels),
        "tflop": total.flops / 1e12,
        "gb": total.moved / 1e9,
        "device_ms": total.seconds * 1e3,
        "host_ms": total.host * 1e3,
        "ms": seconds * 1e3,
        "mfu": needed / seconds / card["peak"],
        "peak_gib": peak / 2**30,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--card", choices=CARDS, default="H100")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--samples", nargs="+", choices=SAMPLES, default=list(SAMPLES))
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--keep", action="store_true", help="write results.json")
    args = parser.parse_args()
    found: dict[str, Any] = {}
    for model in args.models:
        for size in args.samples:
            lengths = SAMPLES[size]
            for variant in args.variants:
                row = predicted(
                    MODELS[model], lengths, lengths[0] - PROMPT, variant, CARDS[args.card]
                )
                found[f"{model}, {size}, {variant}"] = row
                numbers = "  ".join(f"{name} {value:,.3g}" for name, value in row.items())
                print(f"{model:5} {size:4} {variant:15} {numbers}", flush=True)
    if args.keep:
        keep("operators", {"card": args.card, "rows": found})


if __name__ == "__main__":
    main()
