"""Log-probs, entropies and values against a token-by-token oracle, and their invariances."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from tests.engine.batches import P, R, engine, naive_log_probs, ragged_batch
from verlite.engine.micro import MicroBatching, model_inputs
from verlite.protocol.data import DataProto

ALL = MicroBatching(size=100)


@pytest.fixture(params=["qwen2", "llama", "gpt2"])
def path(request: pytest.FixtureRequest, tiny_qwen2: str, tiny_llama: str, tiny_gpt2: str) -> str:
    return {"qwen2": tiny_qwen2, "llama": tiny_llama, "gpt2": tiny_gpt2}[request.param]


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(
    "micro", [MicroBatching(size=3), MicroBatching(max_tokens=20)], ids=["size", "tokens"]
)
def test_log_probs_and_entropy_equal_token_by_token_oracle(
    path: str, packed: bool, micro: MicroBatching
) -> None:
    batch = ragged_batch()
    oracle = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).eval()
    subject = engine(path, use_remove_padding=packed)
    for temperature in (0.7, 1.0, 1.3):
        log_probs, entropy = naive_log_probs(oracle, batch, temperature)
        out = subject.forward(batch, micro, temperature, with_entropy=True)
        assert out["log_probs"].dtype == torch.float32
        torch.testing.assert_close(out["log_probs"].double(), log_probs, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(out["entropy"].double(), entropy, atol=1e-5, rtol=1e-5)


def test_sum_of_squared_probabilities_equals_oracle(tiny_qwen2: str) -> None:
    batch = ragged_batch()
    oracle = AutoModelForCausalLM.from_pretrained(tiny_qwen2, dtype=torch.float64).eval()
    expected = torch.zeros(len(batch), R, dtype=torch.float64)
    for row in range(len(batch)):
        item = batch.batch[row]
        ids = item["input_ids"][item["attention_mask"].bool()]
        prompt = int(item["attention_mask"][:P].sum())
        for j in item["response_mask"].nonzero().flatten().tolist():
            expected[row, j] = (
                (oracle(ids[None, : prompt + j]).logits[0, -1] / 0.7).softmax(-1).square().sum()
            )
    out = engine(tiny_qwen2).forward(batch, MicroBatching(size=3), 0.7, with_sum_pi_squared=True)
    assert out.keys() == {"log_probs", "sum_pi_squared"}
    torch.testing.assert_close(out["sum_pi_squared"].double(), expected, atol=1e-6, rtol=1e-5)


def test_padding_side_does_not_matter(path: str) -> None:
    """Left-padded, right-padded, packed and alone: the same log-probs."""
    batch = ragged_batch()
    right = []
    for row in range(
        len(batch)
    ):  # the same sequence at the left edge: its prompt ends elsewhere, so each row stands alone
        item = batch.batch[row]
        prompt = int(item["attention_mask"][:P].sum())
        tensors = {
            name: item[name].roll(prompt - P)[None]
            for name in ("input_ids", "attention_mask", "position_ids")
        }
        tensors["response_mask"] = torch.zeros(1, P + R - prompt, dtype=torch.int64)
        tensors["response_mask"][0, :R] = item["response_mask"]
        right.append(DataProto.from_dict(tensors))
    packed = engine(path)
    padded = engine(path, use_remove_padding=False)
    expected = packed.forward(batch, ALL)["log_probs"]
    for subject in (packed, padded):
        torch.testing.assert_close(
            subject.forward(batch, ALL)["log_probs"], expected, atol=2e-6, rtol=1e-5
        )
        rows = torch.cat([subject.forward(row, ALL)["log_probs"][:, :R] for row in right])
        torch.testing.assert_close(rows, expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("packed", [True, False])
def test_sequences_do_not_see_each_other_or_padding(tiny_qwen2: str, packed: bool) -> None:
    subject = engine(tiny_qwen2, use_remove_padding=packed)
    batch = ragged_batch()
    before = subject.forward(batch, ALL)["log_probs"]
    other = ragged_batch(seed=1)
    ids = batch.batch["input_ids"].clone()
    ids[3] = other.batch["input_ids"][3]
    after = subject.forward(batch.with_batch(input_ids=ids), ALL)["log_probs"]
    others = [row for row in range(len(batch)) if row != 3]
    assert torch.equal(after[others], before[others])
    assert not torch.equal(after[3], before[3])
    real = batch.batch["attention_mask"].bool()
    rubbish = batch.with_batch(
        input_ids=batch.batch["input_ids"].where(real, 10**9),
        position_ids=batch.batch["position_ids"].where(real, torch.tensor(31)),
    )
    assert torch.equal(subject.forward(rubbish, ALL)["log_probs"], before)


def test_forward_keeps_the_order_of_rows(tiny_qwen2: str) -> None:
    subject = engine(tiny_qwen2)
    batch = ragged_batch()
    expected = subject.forward(batch, ALL)["log_probs"]
    order = torch.tensor([6, 0, 3, 7, 1, 5, 2, 4])
    shuffled = subject.forward(batch.select_idxs(order), MicroBatching(max_tokens=20))["log_probs"]
    torch.testing.assert_close(shuffled, expected[order], atol=2e-6, rtol=1e-5)


def test_only_trainable_tokens_have_values(tiny_qwen2: str) -> None:
    batch = ragged_batch()
    out = engine(tiny_qwen2).forward(batch, ALL, with_entropy=True)
    for values in out.values():
        assert torch.equal(values != 0, batch.batch["response_mask"].bool())


def test_rows_without_trainable_tokens_are_not_run(tiny_qwen2: str) -> None:
    subject = engine(tiny_qwen2)
    batch = ragged_batch()
    ids = batch.batch["input_ids"].clone()
    ids[4] = 10**9  # running this row would raise
    assert torch.equal(
        subject.forward(batch.with_batch(input_ids=ids), ALL)["log_probs"],
        subject.forward(batch, ALL)["log_probs"],
    )


def test_response_without_a_prompt_is_rejected(tiny_qwen2: str) -> None:
    batch = ragged_batch()
    attention_mask = batch.batch["attention_mask"].clone()
    attention_mask[0, :P] = 0
    with pytest.raises(ValueError, match="Every row needs a prompt token"):
        engine(tiny_qwen2).forward(batch.with_batch(attention_mask=attention_mask), ALL)


def test_dropout_is_off_in_updates(tiny_gpt2: str) -> None:
    """With a config dropout of 0.5, loss and forward pass have equal log-probs: the ratio is 1."""
    subject = engine(tiny_gpt2, train=True)
    batch = ragged_batch()
    old = subject.forward(batch, ALL)["log_probs"]
    assert not old.requires_grad, "what an update compares with is a number"
    rows = [row for row in range(len(batch)) if row != 4]
    seen = []

    def loss_fn(micro, outputs, counts):
        seen.append(outputs["log_probs"].detach())
        return outputs["log_probs"].sum(), {}

    subject.update(batch, ALL, 1.0, loss_fn)
    assert torch.equal(seen[0], old[rows])


def test_softmax_runs_in_float32(tiny_qwen2: str) -> None:
    """bfloat16 passes are close to float32. Log-probs, gradients and weights stay float32."""
    exact = engine(tiny_qwen2)
    subject = engine(tiny_qwen2, train=True, dtype="bfloat16")
    batch = ragged_batch()
    expected, actual = (one.forward(batch, ALL, with_entropy=True) for one in (exact, subject))
    for name, values in actual.items():
        assert values.dtype == torch.float32
        torch.testing.assert_close(values, expected[name], atol=0.15, rtol=0.03)
        assert not torch.equal(values, expected[name]), "the pass did not run in bfloat16"
        assert not torch.equal(values, values.bfloat16().float())
    seen = []
    subject.optimizer.register_step_pre_hook(
        lambda *_: seen.extend(p.grad.dtype for p in subject.parameters)
    )
    subject.update(batch, ALL, 1.0, lambda rows, outputs, counts: (outputs["log_probs"].sum(), {}))
    assert set(seen) == {torch.float32} == {p.dtype for p in subject.parameters}


def test_values_ignore_the_temperature(tiny_qwen2: str, tmp_path) -> None:
    batch = ragged_batch()
    fresh = engine(tiny_qwen2, head="value")
    assert torch.equal(fresh.forward(batch, ALL)["values"], torch.zeros(len(batch), R))
    model = AutoModelForTokenClassification.from_pretrained(tiny_qwen2, num_labels=1)
    torch.nn.init.normal_(model.score.weight)
    torch.nn.init.constant_(model.score.bias, 0.3)
    model.save_pretrained(tmp_path)
    trained = engine(str(tmp_path), head="value")
    cold, hot = (
        trained.forward(batch, MicroBatching(size=2), temperature)["values"]
        for temperature in (1.0, 0.1)
    )
    assert torch.equal(cold, hot)
    model.eval()
    for row in range(len(batch)):
        item = batch.batch[row]
        ids = item["input_ids"][item["attention_mask"].bool()]
        prompt = int(item["attention_mask"][:P].sum())
        for j in item["response_mask"].nonzero().flatten().tolist():
            expected = model(ids[None, : prompt + j]).logits[0, -1, 0].detach()
            torch.testing.assert_close(cold[row, j], expected, atol=1e-5, rtol=1e-5)


def test_micro_batching_needs_exactly_one_limit() -> None:
    for wrong in ({}, {"size": 2, "max_tokens": 10}, {"size": 0}, {"max_tokens": 0}):
        with pytest.raises(ValueError, match="micro-batches"):
            MicroBatching(**wrong)


def test_rows_are_sent_with_their_inputs() -> None:
    rows = ragged_batch().batch
    sent = torch.device("meta")
    inputs, moved = model_inputs(rows, packed=True).to(sent, rows)
    assert inputs.input_ids.device == inputs.targets.source.device == sent
    assert moved is not None and moved.device == sent  # loss functions read it
    assert {value.device for value in moved.values()} == {sent} and moved.shape == rows.shape
    assert rows["input_ids"].device.type == "cpu"
