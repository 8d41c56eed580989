"""Engines on tensors without values: bytes by hand, and few layers for the whole model."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.sizing.conftest import config_folder
from verlite.algorithms.logprobs import token_log_probs
from verlite.sizing.dry_engine import BytesTracker, DryEngineSpec, Segment
from verlite.sizing.facts import model_facts
from verlite.sizing.measure import LONG, SHORT, Passes, PassRows, measure, peak
from verlite.spec.roles import FSDPSpec, ModelSpec, OptimSpec

pytestmark = pytest.mark.slow

ROWS = PassRows((96, 96), 64, several=True)


@pytest.fixture
def spec(tmp_path) -> DryEngineSpec:
    """Return the engine of an 8-layer model on 8 GPUs."""
    model = ModelSpec(path=str(config_folder(tmp_path / "tiny", "tiny")))
    return DryEngineSpec(model, FSDPSpec(), OptimSpec(), "lm", 8, 1, "cuda", "bfloat16")


def with_model(spec: DryEngineSpec, **changes: object) -> DryEngineSpec:
    return replace(spec, model=replace(spec.model, **changes))


def with_fsdp(spec: DryEngineSpec, **changes: object) -> DryEngineSpec:
    return replace(spec, fsdp=replace(spec.fsdp, **changes))


def layers(count: int) -> dict[str, object]:
    return {"num_hidden_layers": count, "layer_types": ["full_attention"] * count}


VARIANTS = {
    "GPUs": lambda spec: spec,
    "one CPU": lambda spec: replace(spec, kind="cpu", dtype="float32", ranks=1),
    "all activations, padded": lambda spec: with_model(
        spec, enable_gradient_checkpointing=False, use_remove_padding=False
    ),
    "activation offload, sequence parallel": lambda spec: with_model(
        replace(spec, sequence_parallel=2), enable_activation_offload=True
    ),
    "products kept": lambda spec: with_model(spec, enable_gradient_checkpointing="products"),
    "LoRA": lambda spec: with_model(spec, lora_rank=4),
    "ZeRO-2, replicas": lambda spec: with_fsdp(spec, reshard_after_forward=False, fsdp_size=2),
    "critic": lambda spec: replace(spec, head="value"),
    "reference": lambda spec: replace(spec, optim=None),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_few_layers_give_the_memory_of_all(spec, variant):
    """Byte for byte, in every pass."""
    chosen = with_model(VARIANTS[variant](spec), override_config=layers(LONG + 2))
    passes = Passes(ROWS, None if chosen.optim is None else ROWS, True, False, "loss")
    if chosen.head == "value":
        passes = replace(passes, forward_entropy=False, update_entropy="")
    estimated = measure(chosen, passes)
    assert estimated == measure(chosen, passes, whole=True)
    assert estimated.forward > estimated.resident
    assert estimated.update > estimated.forward or chosen.optim is None
    assert not dist.is_initialized()


def test_shards_by_hand(spec):
    """float32 parameters and two moments: 12 bytes per parameter over the ranks."""
    count = model_facts(spec.model).parameters
    tensors = 8 * 12 + 3  # matrices, biases and norms of a layer; embeddings, last norm, head
    memory = measure(spec, Passes(None, None))
    tables = 2 * 8 * 4  # rotary frequencies, whole on every rank
    assert memory.parameters - tables == count * 4 // 8
    assert memory.optimizer == count * 8 // 8 + tensors * 4  # and a step count each
    small = measure(with_fsdp(spec, model_dtype="bfloat16"), Passes(None, None))
    assert small.parameters - tables == count * 2 // 8
    replicas = measure(with_fsdp(spec, fsdp_size=2), Passes(None, None))
    assert replicas.parameters - tables == count * 4 // 2


def test_checkpointing_stores_one_input_per_layer(spec):
    """One input of [tokens, hidden] in bfloat16; with activation offload it is in host memory."""
    tokens = sum(ROWS.lengths)

    def update(count: int) -> int:
        chosen = with_model(spec, override_config=layers(count), enable_activation_offload=True)
        return measure(chosen, Passes(None, ROWS)).host

    assert update(5) - update(4) == tokens * 64 * 2


@pytest.mark.parametrize("packed", [True, False])
def test_what_a_layer_keeps_by_hand(spec, packed):
    """Per token and layer in bfloat16, beside the input of 64: attention's output of 64 and 4
    logarithms in float32, and products of 64 queries, 32 keys, 32 values, 64 outputs and twice 96
    of the MLP. The last product, of 64, is kept although the backward pass does not use it. A
    packed kernel also returns 16 bytes of state."""
    spec = with_model(spec, use_remove_padding=packed)

    def of_a_layer(kept: object) -> int:
        few, more = (
            measure(
                with_model(spec, override_config=layers(n), enable_gradient_checkpointing=kept),
                Passes(None, ROWS),
                whole=True,
            ).update
            for n in (3, 4)
        )
        return more - few

    tokens = sum(ROWS.lengths)
    attention = of_a_layer("attention") - of_a_layer(True)
    assert attention == tokens * (64 * 2 + 4 * 4) + 16 * packed
    products = of_a_layer("products") - of_a_layer("attention")
    assert products == tokens * 2 * (64 + 32 + 32 + 64 + 2 * 96 + 64)


def test_shared_prefixes_cost_copies_of_keys_and_values(spec):
    """A prompt of 80 tokens and 8 responses of 16: 208 tokens on paths of 768, which are copied in
    bfloat16, 2 heads of 16 for keys and for values. Beside as many tokens of their own."""
    shared, own = PassRows((96,) * 8, 16, prompts=(0,) * 8), PassRows((104, 104), 16)

    def of_a_layer(rows: PassRows) -> int:
        few, more = (
            with_model(spec, override_config=layers(n), enable_gradient_checkpointing=False)
            for n in (3, 4)
        )
        return (
            measure(more, Passes(None, rows), whole=True).update
            - measure(few, Passes(None, rows), whole=True).update
        )

    assert of_a_layer(shared) - of_a_layer(own) == (768 - 208) * 2 * (2 * 16) * 2


@pytest.mark.parametrize("chunk", [128, 512])
def test_logits_exist_one_chunk_at_a_time(chunk):
    """A chunk's logits, and as much again: the chunk before, and inside logsumexp."""
    tokens, hidden, vocabulary = 512, 8, 1000
    mode = FakeTensorMode()
    tracker = BytesTracker(mode)
    with tracker, mode, torch.no_grad():
        states = torch.empty(tokens, hidden)
        weight = torch.empty(vocabulary, hidden)
        labels = torch.empty(tokens, dtype=torch.int64)
        before = tracker.live
        assert before == 4 * hidden * (tokens + vocabulary) + 8 * tokens
        log_probs, _ = token_log_probs(states, weight, labels, chunk=chunk)
        above = tracker.peak - before - 2 * 4 * chunk * vocabulary
        assert 0 <= above <= 6 * 4 * tokens
        del log_probs, states, weight, labels
    assert tracker.live == 0


def test_a_peak_between_the_ends_is_found():
    """Peaks are linear in the layer's number, so the largest is at an end of the middle."""

    def run(count: int) -> list[Segment]:
        peaks = {0: 1000 + 10 * count, count - 1: 100 + 20 * count}
        found = []
        for number in range(count):
            peak = peaks.get(number, 500 + 7 * count + 3 * number)
            found.append(Segment(("forward", number), peak, 0))
        return [*found, Segment(("head",), 30 * count, 0)]

    short, long = run(SHORT), run(LONG)
    for count in (4, 5, 40, 400):
        expected = max(segment.peak for segment in run(count))
        assert peak(short, long, count) == expected


def test_layers_that_differ_are_all_run(tmp_path):
    """Experts in every second layer: nothing can be extrapolated."""
    (tmp_path / "config.json").write_text(
        '{"model_type": "qwen3_moe", "vocab_size": 128, "hidden_size": 32, "head_dim": 8,'
        ' "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2,'
        ' "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,'
        ' "intermediate_size": 48, "decoder_sparse_step": 2, "tie_word_embeddings": false}'
    )
    model = ModelSpec(path=str(tmp_path))
    spec = DryEngineSpec(model, FSDPSpec(), None, "lm", 2, 1, "cuda", "bfloat16")
    memory = measure(spec, Passes(None, None))
    assert memory.parameters == pytest.approx(model_facts(model).parameters * 4 / 2, rel=0.001)
