"""Mutants of verlite.engine: training steps that do something else than they should."""

import dataclasses

from tests.mutants import Mutant
from tests.mutants.patches import argument, attribute, calls, constant, does_nothing, result

ATTENTION = "verlite.engine.attention:"
MICRO = "verlite.engine.micro:"
LOADING = "verlite.engine.loading:"
MODEL = "verlite.engine.model:"
FSDP = "verlite.engine.fsdp:"
OPTIM = "verlite.engine.optim:"
ULYSSES = "verlite.engine.ulysses:"
CHECKPOINT = "verlite.engine.checkpoint:"
LORA = "verlite.engine.lora:"
PACKING = "verlite.algorithms.packing:"
PASSES = "tests/engine/test_passes.py"
TREES = "tests/engine/test_trees.py"
UPDATE = "tests/engine/test_update.py"
SEQUENCE_PARALLEL = "tests/engine/test_ulysses.py"
LOADED = "tests/engine/test_loading.py"
REFILLED = "tests/engine/test_refill.py"
SAVED = "tests/engine/test_checkpoint.py"
ADAPTERS = "tests/engine/test_lora.py"


def _shifted_by_one(original, *args, **kwargs):
    targets = original(*args, **kwargs)
    return dataclasses.replace(targets, labels=targets.labels.roll(1))


def _every_response_token(original, rows, *rest):
    everything = rows.clone(recurse=False)
    columns = rows["response_mask"].shape[1]
    everything["response_mask"] = rows["attention_mask"][:, -columns:]
    return original(everything, *rest)


def _counts_of_micro_batch(original, self, rows, part, temperature, loss_fn, with_entropy, counts):
    if part is not None:
        mask = rows["response_mask"][part.rows]
        counts = type(counts)(int(mask.sum()), int(mask.any(-1).sum()))
    return original(self, rows, part, temperature, loss_fn, with_entropy, counts)


def _sibling_seen(original, *args, **kwargs):
    tree = original(*args, **kwargs)
    if tree is None:
        return None
    import torch

    paths = [tree.paths[0]]
    own = [path[-new:] for path, new in zip(tree.paths, tree.lengths, strict=True)]
    for path, before, new in zip(tree.paths[1:], own, own[1:], strict=False):
        known = path[: -len(new)]
        paths.append(torch.cat([known, before, new]) if len(known) else path)
    return dataclasses.replace(tree, paths=tuple(paths))


def _prefix_twice(original, *args, **kwargs):
    tree = original(*args, **kwargs)
    if tree is None:
        return None
    import torch

    known = [path[:-new] for path, new in zip(tree.paths, tree.lengths, strict=True)]
    paths = tuple(torch.cat([first, path]) for first, path in zip(known, tree.paths, strict=True))
    return dataclasses.replace(tree, paths=paths)


def _prefix_trained_by_one(original, self, x):
    import torch

    selected, seen = x[:, :, self.tokens], set()
    is_first = [not (token in seen or seen.add(token)) for token in self.tokens.tolist()]
    return torch.where(torch.tensor(is_first)[:, None], selected, selected.detach())


def _positions_restarted(original, batch, tree, targets, shape):
    import torch

    inputs = original(batch, tree, targets, shape)
    positions = torch.cat([torch.arange(length) for length in tree.lengths])
    return dataclasses.replace(inputs, position_ids=positions[None])


def _next_in_the_tree(original, batch, tree, targets, shape):
    inputs = original(batch, tree, targets, shape)
    following = inputs.input_ids[0].roll(-1)[inputs.targets.source]
    targets = dataclasses.replace(inputs.targets, labels=following)
    return dataclasses.replace(inputs, targets=targets)


def _averaged_over_ranks(original, self, *args, **kwargs):
    world_size = self.world_size
    self.world_size = 1
    try:
        return original(self, *args, **kwargs)
    finally:
        self.world_size = world_size


def _step_per_micro_batch(original, self, *args, **kwargs):
    results = original(self, *args, **kwargs)
    self.optimizer.step()
    return results


def _keeps_gradients(original, self, *args, **kwargs):
    self.optimizer.zero_grad = lambda set_to_none=True: None
    return original(self, *args, **kwargs)


def _no_clipping(original, parameters, max_norm):
    return original(parameters, float("inf"))


def _maxima_added(original, name, a, b):
    return a + b


def _noise_kept(original, config, model):
    changed = original(config, model)
    for name, value in config.to_dict().items():
        if "pdrop" in name or "dropout" in name:
            setattr(changed, name, value)
    return changed


def _nan_is_finite(original, self, is_finite, batch, dump_dir):
    return None


def _schedule_per_update(original, self, *args, **kwargs):
    metrics = original(self, *args, **kwargs)
    self.step_schedule()
    return metrics


def _warmup_from_zero(original, config, step, total_steps):
    from verlite.engine.optim import warmup_steps

    warmup = warmup_steps(config, total_steps)
    return config.lr * step / warmup if step < warmup else original(config, step, total_steps)


def _all_tokens_on_every_rank(original, self, values):
    without_group = self
    if self.sequences is not None:
        sequences = dataclasses.replace(self.sequences, group=None)
        without_group = dataclasses.replace(self, sequences=sequences)
    return original(without_group, values)


def _no_moments(original, model, optimizer):
    return original(model, None)


def _unscaled(original, layer, dtype, device):
    return layer.base_layer.weight.detach().to(device, dtype)


MUTANTS = [
    # what a pass computes
    Mutant(
        "a damaged model folder ends in a library's own error",
        "verlite.engine.folder:reading",
        calls(lambda original, what: __import__("contextlib").nullcontext()),
        ("tests/engine/test_model.py",),
    ),
    Mutant(
        "packed sequences attend to each other",
        ATTENTION + "_per_sequence",
        argument(
            "sequences",
            lambda s: dataclasses.replace(s, lengths=(sum(s.lengths),), paths=None),
        ),
        (PASSES,),
    ),
    Mutant(
        "the sliding window is one token longer",
        "verlite.algorithms.attention:_mask",
        argument("window", lambda window: window and window + 1),
        ("tests/engine/test_attention.py",),
    ),
    Mutant(
        "soft-capping is silently ignored",
        ATTENTION + "_UNSUPPORTED",
        constant(()),
        ("tests/engine/test_attention.py",),
    ),
    Mutant(
        "labels are shifted by one token",
        PACKING + "response_targets",
        calls(_shifted_by_one),
        (PASSES,),
    ),
    Mutant("tool text is trained", MICRO + "model_inputs", calls(_every_response_token), (PASSES,)),
    Mutant(
        "the temperature is dropped in forward passes",
        FSDP + "TrainEngine.forward",
        argument("temperature", lambda temperature: 1.0),
        (PASSES,),
    ),
    Mutant(
        "updates run with dropout",
        "verlite.engine.model:training_config",
        calls(_noise_kept),
        (PASSES,),
    ),
    # trees
    Mutant("a branch sees its sibling", MICRO + "prefix_tree", calls(_sibling_seen), (TREES,)),
    Mutant("a branch sees its prefix twice", MICRO + "prefix_tree", calls(_prefix_twice), (TREES,)),
    Mutant(
        "one branch trains the shared prefix",
        ATTENTION + "Paths.gather",
        calls(_prefix_trained_by_one),
        (TREES,),
    ),
    Mutant(
        "positions of a branch restart at 0",
        MICRO + "_tree_inputs",
        calls(_positions_restarted),
        (TREES,),
    ),
    Mutant(
        "a fork's label is the first child's",
        MICRO + "_tree_inputs",
        calls(_next_in_the_tree),
        (TREES,),
    ),
    # updates
    Mutant(
        "the loss counts the tokens of its micro-batch",
        FSDP + "TrainEngine._backward",
        calls(_counts_of_micro_batch),
        (UPDATE,),
    ),
    Mutant(
        "gradients are averaged over ranks",
        FSDP + "TrainEngine._backward",
        calls(_averaged_over_ranks),
        (UPDATE,),
    ),
    Mutant(
        "there is an optimizer step per micro-batch",
        FSDP + "TrainEngine._backward",
        calls(_step_per_micro_batch),
        (UPDATE,),
    ),
    Mutant(
        "gradients are kept for the next update",
        FSDP + "TrainEngine.update",
        calls(_keeps_gradients),
        (UPDATE,),
    ),
    Mutant("gradients are not clipped", OPTIM + "clip_gradients", calls(_no_clipping), (UPDATE,)),
    Mutant(
        "maxima are added up over micro-batches", FSDP + "_combine", calls(_maxima_added), (UPDATE,)
    ),
    Mutant(
        "dropped updates never stop the run",
        FSDP + "TrainEngine._handle_nonfinite",
        calls(_nan_is_finite),
        (UPDATE,),
    ),
    Mutant(
        "weight decay is forgotten",
        OPTIM + "build_adamw",
        argument("config", attribute("weight_decay", lambda decay: 0.0)),
        (UPDATE,),
    ),
    Mutant(
        "the learning-rate schedule advances per update",
        FSDP + "TrainEngine.update",
        calls(_schedule_per_update),
        ("tests/engine/test_optim.py",),
    ),
    Mutant(
        "warm-up starts at a learning rate of 0",
        OPTIM + "learning_rate",
        calls(_warmup_from_zero),
        ("tests/engine/test_optim.py",),
    ),
    # sequence parallelism
    Mutant(
        "a rank sees only its own tokens of a shared row",
        MICRO + "ModelInputs.scatter",
        calls(_all_tokens_on_every_rank),
        (SEQUENCE_PARALLEL,),
    ),
    Mutant(
        "heads are exchanged in the wrong order",
        ULYSSES + "to_tokens",
        argument("attended", lambda attended: attended.flip(2)),
        (SEQUENCE_PARALLEL,),
    ),
    # loading
    Mutant(
        "another engine's weights are not copied",
        LOADING + "copy_own_part",
        does_nothing,
        (REFILLED,),
    ),
    Mutant(
        "weights that stay float32 are rounded",
        MODEL + "_stays_float32",
        result(lambda stays: False),
        (LOADED,),
    ),
    # checkpoints, export, adapters
    Mutant("Adam's moments are not saved", CHECKPOINT + "_tensors", calls(_no_moments), (SAVED,)),
    Mutant(
        "random generators are not restored", CHECKPOINT + "_set_rng_state", does_nothing, (SAVED,)
    ),
    Mutant(
        "weights that are not finite are accepted",
        CHECKPOINT + "nonfinite",
        result(lambda names: []),
        (SAVED,),
    ),
    Mutant("merged weights leave the adapter out", LORA + "merged", calls(_unscaled), (ADAPTERS,)),
    Mutant(
        "a reference pass uses the adapters",
        LORA + "disabled",
        calls(lambda original, model: __import__("contextlib").nullcontext()),
        (ADAPTERS,),
    ),
]
