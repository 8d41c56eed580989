"""What the log-prob probe of a weight sync sees: faults planted in small trained models.

python recipes/benchmark/probe.py [--steps 500] [--out FILE.json]

A 12-layer dense model and a 6-layer mixture of experts learn the letters of Python's own help texts
for a minute on a CPU, because weights that were trained differ from layer to layer more than new
ones do. Each fault leaves the fingerprint as it is. It counts as seen if the probe refuses it at
the limit of float32, and at that of half precision. It prints the table of docs/weights.md, and
what rounding to half precision gives without a fault.
"""

import argparse
import copy
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from verlite.engine.folder import experts_of
from verlite.weights.probe import Gap, Probe, gap, probe_ids, probe_length, probe_limit

HALF_LIMITS = {"dense": 0.05, "experts": 0.15}  # rollout.log_prob_gap_limit; 0.05 in float32
_COMMON = dict(vocab_size=128, hidden_size=64, num_attention_heads=4, num_key_value_heads=2)
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("qwen2", dict(num_hidden_layers=12, intermediate_size=192)),
    "experts": (
        "qwen3_moe",
        dict(
            num_hidden_layers=6,
            num_experts=16,
            num_experts_per_tok=2,
            moe_intermediate_size=64,
            head_dim=16,
            output_router_logits=True,  # the load of the experts is part of the loss
        ),
    ),
}


def trained(name: str, steps: int) -> nn.Module:
    """Return a model after that many steps of next-letter prediction."""
    arch, sizes = SHAPES[name]
    torch.manual_seed(0)
    config = AutoConfig.for_model(arch, **_COMMON, **sizes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    data = torch.tensor([ord(letter) % 128 for key in sorted(topics) for letter in topics[key]])
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1)
    generator = torch.Generator().manual_seed(0)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 2e-3 * min(1, (step + 1) / 50) * (1 - 0.9 * step / steps)
        starts = torch.randint(len(data) - 65, (16,), generator=generator).tolist()
        batch = torch.stack([data[start : start + 65] for start in starts])
        model(batch, labels=batch).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def log_probs(model: nn.Module, ids: list[int]) -> list[float]:
    with torch.no_grad():
        rows = model(torch.tensor([ids])).logits[0, :-1].float().log_softmax(-1)
    return rows.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()


def loads(model: nn.Module, ids: list[int]) -> list[Tensor]:
    """Return the tokens of each expert [experts], by layer."""
    found: list[Tensor] = []
    hooks = [
        module.register_forward_pre_hook(
            lambda module, args: found.append(
                torch.bincount(args[1].flatten(), minlength=module.num_experts)
            )
        )
        for module in model.modules()
        if type(module).__name__.endswith("Experts")
    ]
    log_probs(model, ids)
    for hook in hooks:
        hook.remove()
    return found


def faults(model: nn.Module) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield each fault's kind, and a function that plants it, or takes it back."""
    named = {n: p for n, p in model.named_parameters() if ".layers." in n}
    places = {n: (int(n.split(".")[2]), n.split(".", 3)[3]) for n in named}

    def exchange(a: Tensor, b: Tensor) -> None:
        kept = a.clone()
        a.copy_(b)
        b.copy_(kept)

    for a, b in itertools.combinations(named, 2):
        (layer, kind), (other, other_kind) = places[a], places[b]
        both = named[a], named[b]
        is_matrix = named[a].ndim > 1
        if kind == other_kind and other - layer == 1 and (is_matrix or "norm" in kind):
            what = "a matrix and that of the next layer" if is_matrix else "norms of two layers"
            yield f"exchanged: {what}", lambda both=both: exchange(*both)
        elif layer == other and is_matrix and both[0].shape == both[1].shape:
            what = "exchanged: two matrices of a layer (q and o, k and v, gate and up)"
            yield what, lambda both=both: exchange(*both)
    for name, weight in named.items():
        if weight.ndim == 2 and weight.shape[0] == weight.shape[1]:
            yield "transposed: q or o", lambda weight=weight: weight.copy_(weight.t().clone())
        if name.endswith("experts.down_proj"):
            stacks = weight, named[name.replace("down_proj", "gate_up_proj")]
            for i in range(0, len(weight), 2):
                yield (
                    "exchanged: two experts of a layer",
                    lambda stacks=stacks, i=i: [exchange(s[i], s[i + 1]) for s in stacks],
                )


def measure(name: str, steps: int) -> dict[str, Any]:
    model = trained(name, steps)
    ids = probe_ids(128, probe_length(*experts_of(model.config)))
    expected = tuple(log_probs(model, ids))

    def compare(found: list[float]) -> Gap:
        return gap(Probe(tuple(ids), expected, 0.0), found)

    rounding = {
        dtype: compare(log_probs(copy.deepcopy(model).to(getattr(torch, dtype)), ids))
        for dtype in ("bfloat16", "float16")
    }
    limits = {
        "float32": probe_limit(0.05, "float32"),
        "half": probe_limit(HALF_LIMITS[name], "bfloat16"),
    }
    planted, seen, by_median = Counter(), Counter(), Counter()
    for kind, change in faults(model):
        with torch.no_grad():
            change()
            found = compare(log_probs(model, ids))
            change()
        planted[kind] += 1
        for dtype, limit in limits.items():
            seen[kind, dtype] += not found.is_within(limit)
            by_median[kind, dtype] += not found.relative <= limit
    if log_probs(model, ids) != list(expected):
        raise AssertionError("a fault was not taken back")
    visits = loads(model, ids)
    return {
        "tokens": len(ids),
        "experts_without_tokens": sum(int((load == 0).sum()) for load in visits),
        "rounding": {dtype: (g.relative, g.tail) for dtype, g in rounding.items()},
        "limits": limits,
        "faults": {
            kind: {
                "planted": count,
                **{dtype: seen[kind, dtype] for dtype in limits},
                **{f"{dtype}, median alone": by_median[kind, dtype] for dtype in limits},
            }
            for kind, count in planted.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    measured = {name: measure(name, args.steps) for name in SHAPES}
    if args.out:
        args.out.write_text(json.dumps(measured, indent=1) + "\n")
    print("| model | fault | planted | float32 | half | by the median alone |")
    print("|---|---|---|---|---|---|")
    for name, found in measured.items():
        for kind, row in found["faults"].items():
            alone = f"{row['float32, median alone']}, {row['half, median alone']}"
            cells = (name, kind, row["planted"], row["float32"], row["half"], alone)
            print("| " + " | ".join(map(str, cells)) + " |")
    for name, found in measured.items():
        rest = {key: value for key, value in found.items() if key != "faults"}
        print(name, json.dumps(rest))


if __name__ == "__main__":
    main()
