"""Direct preference optimization: its loss by hand, its steps by a plain loop, and exact resume."""

import copy
import json
import math
import subprocess
import sys

import pytest
import torch
from tensordict import TensorDict
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from tests.sft.rows import read_pairs
from tests.sft.test_train import lines, numbers, weights
from verlite.cli import app
from verlite.config.sft import DPODataConfig
from verlite.data.dataset import DataError
from verlite.data.prompts import build_prompt
from verlite.data.sampler import PromptSampler
from verlite.engine.fsdp import Counts
from verlite.engine.micro import MicroBatching
from verlite.main_dpo import main
from verlite.sft.dpo import dpo_loss

pytestmark = pytest.mark.process

ROWS = [
    {"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": str(a * b)}
    for a in range(0, 24, 3)
    for b in range(2, 10)
]
"""64 rows."""


def write(path, rows):
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


@pytest.fixture
def file(tmp_path):
    return write(tmp_path / "rows.jsonl", ROWS)


def options(file, model, run_dir, *more):
    return [
        f"data.train_files={file}",
        f"data.val_files={file}",
        f"model.path={model}",
        f"trainer.default_local_dir={run_dir}",
        "data.train_batch_size=16",
        "optim.lr=3e-3",
        "trainer.device=cpu",
        *more,
    ]


def test_loss_of_two_pairs():
    """By hand: sums of log-probs, those of the reference, and the rewards with beta = 0.5.

    pair 1: chosen -3 and -4, so 0.5; rejected -2 and -1, so -0.5; margin 1; log(1 + 1/e).
    pair 2: chosen -2 and -2, rejected -3 and -3; margin 0; log 2.
    """
    log_probs = torch.tensor([[-1.0, -2.0], [-2.0, -9.0], [-2.0, -9.0], [-0.5, -2.5]])
    rows = TensorDict(
        {
            "response_mask": torch.tensor([[1, 1], [1, 0], [1, 0], [1, 1]]),
            "ref_log_prob_sums": torch.tensor([-4.0, -1.0, -2.0, -3.0], dtype=torch.float64),
        },
        [4],
    )
    loss, metrics = dpo_loss(rows, {"log_probs": log_probs}, Counts(tokens=6, sequences=4), 0.5)
    assert float(loss) == pytest.approx((math.log(1 + 1 / math.e) + math.log(2)) / 2)
    assert {name: float(value) for name, value in metrics.items()} == {
        "rewards/accuracy": 0.5,
        "rewards/margin": 0.5,
        "rewards/chosen": 0.25,
        "rewards/rejected": -0.25,
        "tokens": 6.0,
    }


@pytest.mark.parametrize("micro", [{"size": 2}, {"max_tokens": 21}])
def test_pairs_stay_in_one_pass(micro):
    mask = torch.ones(10, 4, dtype=torch.int64)
    lengths = torch.tensor([4, 1, 2, 6, 5, 5, 1, 2, 6, 6])
    attention = (torch.arange(8) < lengths[:, None]).long()
    rows = TensorDict({"response_mask": mask, "attention_mask": attention}, [10])
    parts = [part.rows for part in MicroBatching(**micro, together=2).split(rows)]
    assert len(parts) > 1 and sorted(torch.cat(parts).tolist()) == list(range(10))
    for part in parts:
        chosen, rejected = part[0::2], part[1::2]
        assert (chosen % 2 == 0).all() and torch.equal(rejected, chosen + 1)
        assert len(chosen) <= 2 if "size" in micro else lengths[part].sum() <= 21


def plain_losses(path, batches, beta, lr, weight_decay, betas, grad_clip):
    """Return the loss of each step of a loop that uses only torch and transformers, one response
    at a time, and the trained model."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    start = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=betas, weight_decay=weight_decay)

    def log_prob(scored, example):
        ids = torch.tensor([example.prompt + example.response])
        each = scored(input_ids=ids).logits[0, :-1].log_softmax(-1)
        picked = each.gather(1, ids[0, 1:, None])[:, 0]
        return picked[len(example.prompt) - 1 :].sum()

    losses = []
    for batch in batches:
        total = 0.0
        for chosen, rejected in batch:
            better = log_prob(model, chosen) - log_prob(start, chosen)
            worse = log_prob(model, rejected) - log_prob(start, rejected)
            loss = -logsigmoid(beta * (better - worse)) / len(batch)
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, model


def test_steps_equal_a_plain_loop(tiny_qwen2, file, tmp_path):
    """Five steps, in passes of at most 60 tokens."""
    settings = [
        "beta=0.3",
        "data.max_token_len_per_gpu=60",
        "optim.lr_scheduler_type=constant",
        "optim.lr_warmup_steps_ratio=0",
        "optim.weight_decay=0.1",
        "trainer.total_training_steps=5",
    ]
    assert main(options(file, tiny_qwen2, tmp_path / "run", *settings)) == 0
    steps = lines(tmp_path / "run")
    tokenizer = AutoTokenizer.from_pretrained(tiny_qwen2)
    examples = read_pairs(file, tokenizer, DPODataConfig())
    order = PromptSampler(64, 16, 42)
    batches = [
        [(examples[2 * row], examples[2 * row + 1]) for row in order.next_batch()] for _ in range(5)
    ]
    expected, model = plain_losses(tiny_qwen2, batches, 0.3, 3e-3, 0.1, (0.9, 0.999), 1.0)
    found = [line["train/loss"] for line in steps]
    assert len(found) == 5 and found == pytest.approx(expected, abs=1e-5)
    assert found[0] == pytest.approx(math.log(2), abs=1e-5) and found[-1] < 0.6
    assert steps[-1]["val/loss"] < 0.45 and steps[-1]["val/rewards/accuracy"] > 0.7
    margin = steps[-1]["val/rewards/chosen"] - steps[-1]["val/rewards/rejected"]
    assert steps[-1]["val/rewards/margin"] == pytest.approx(margin) and margin > 0.3
    trained = weights(tmp_path / "run")
    for name, weight in model.state_dict().items():
        if "k_proj.bias" not in name:  # softmax ignores it, so its gradient is rounding only
            torch.testing.assert_close(trained[name], weight, atol=1e-4, rtol=0)


@pytest.mark.parametrize("lora", [[], ["model.lora_rank=4"]], ids=["full", "lora"])
def test_stopped_run_resumes_to_the_same_numbers(tiny_qwen2, file, tmp_path, lora, stopping):
    """The reference is the model at the start of the first run, not that of the checkpoint."""
    more = ["trainer.total_epochs=2", "trainer.save_freq=4", "trainer.test_freq=2", *lora]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert main(options(file, tiny_qwen2, parts, *more)) == 75
    stopping.undo()
    assert main(options(file, tiny_qwen2, whole, *more)) == 0
    assert main(options(file, tiny_qwen2, parts, *more)) == 0
    assert numbers(parts) == numbers(whole) and len(numbers(whole)) == 8
    assert numbers(whole)[-1]["train/loss"] < 0.65
    for name, weight in weights(whole).items():
        assert torch.equal(weights(parts)[name], weight), name
    assert main(options(file, tiny_qwen2, parts, *more, "beta=0.2")) == 2


def test_two_ranks_that_share_passes_equal_one(tiny_qwen2, file, tmp_path):
    more = ["trainer.total_training_steps=3", "trainer.test_freq=3", "data.train_batch_size=7"]
    assert main(options(file, tiny_qwen2, tmp_path / "one", *more)) == 0
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    several = ["ulysses_sequence_parallel_size=2", "data.max_token_len_per_gpu=40"]
    command = [*start, "-m", "verlite.main_dpo"]
    done = subprocess.run(
        [*command, *options(file, tiny_qwen2, tmp_path / "two", *more, *several)],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    for one, two in zip(numbers(tmp_path / "one"), numbers(tmp_path / "two"), strict=True):
        del one["train/tokens_computed"], two["train/tokens_computed"]  # passes differ
        assert two == pytest.approx(one, rel=1e-3, abs=1e-6)


QUESTION = {"role": "user", "content": "1+2="}
BETTER = {"role": "assistant", "content": "3"}
WORSE = {"role": "assistant", "content": "4"}


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [QUESTION], "chosen": "3", "rejected": "4"},
        {"chosen": [QUESTION, BETTER], "rejected": [QUESTION, WORSE]},
        {"prompt": "1+2=", "chosen": [BETTER], "rejected": [WORSE]},
        {"prompt": "1+2=", "chosen": [QUESTION, BETTER], "rejected": [QUESTION, WORSE]},
        {"prompt": "1+2=", "chosen": [QUESTION, BETTER], "rejected": "4"},
        {"chosen": json.dumps([QUESTION, BETTER]), "rejected": json.dumps([QUESTION, WORSE])},
        {"prompt": json.dumps([QUESTION]), "chosen": "3", "rejected": json.dumps([WORSE])},
    ],
    ids=[
        *("prompt of messages", "whole conversations", "answers as messages", "prompt given twice"),
        *("prompt given with one", "conversations as JSON", "prompt as JSON"),
    ],
)
def test_forms_of_a_row(tiny_qwen2, tmp_path, row):
    tokenizer = AutoTokenizer.from_pretrained(tiny_qwen2)
    plain = {"prompt": "1+2=", "chosen": "3", "rejected": "4"}
    expected = read_pairs(write(tmp_path / "a.jsonl", [plain]), tokenizer, DPODataConfig())
    found = read_pairs(write(tmp_path / "b.jsonl", [row]), tokenizer, DPODataConfig())
    assert found == expected and len(found) == 2
    assert tokenizer.decode(found[0].response[:-1]) == "3"
    assert found[1].response[-1] == tokenizer.eos_token_id


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "1", "chosen": 3, "rejected": "4"}, "column 'chosen' is '3', expected text"),
        ({"chosen": "3", "rejected": "4"}, "row 0: there is no prompt: neither a column 'prompt'"),
        ({"chosen": [QUESTION, BETTER], "rejected": [BETTER]}, "nor the same messages before"),
        ({"prompt": "1", "chosen": [QUESTION], "rejected": "4"}, "is not the assistant's"),
        ({"prompt": "1", "chosen": "3"}, "has no column 'rejected'.*Set data.chosen_key"),
        (
            {"prompt": "1", "chosen": [QUESTION, BETTER], "rejected": [QUESTION, WORSE]},
            "row 0: column 'chosen': 1 messages before the response neither begin nor end with",
        ),
        (
            {
                "prompt": "1+2=",
                "chosen": [QUESTION, BETTER, QUESTION, BETTER],
                "rejected": [QUESTION, WORSE, QUESTION, BETTER],
            },
            "before the responses in 'chosen' and 'rejected' are different",
        ),
        (
            {
                "prompt": "1+2=",
                "chosen": [QUESTION, BETTER],
                "rejected": [QUESTION, BETTER, QUESTION, WORSE],
            },
            "before the responses in 'chosen' and 'rejected' are different",
        ),
        (
            {"prompt": "1", "chosen": [{**BETTER, "tool_calls": [{}]}], "rejected": "4"},
            "column 'chosen': the last message has tool_calls",
        ),
        ({"prompt": "1" * 9, "chosen": "3", "rejected": "4"}, "more than data.max_length=10"),
    ],
)
def test_wrong_rows(tiny_qwen2, tmp_path, row, message):
    tokenizer = AutoTokenizer.from_pretrained(tiny_qwen2)
    file = write(tmp_path / "rows.jsonl", [row])
    with pytest.raises(DataError, match=message):
        read_pairs(file, tokenizer, DPODataConfig(max_length=10))


def test_turns_between_prompt_and_response_are_in_the_prompt(tiny_qwen2, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(tiny_qwen2)
    before = [QUESTION, BETTER, {"role": "user", "content": "+1="}]
    row = {"prompt": "1+2=", "chosen": [*before, WORSE], "rejected": [*before, BETTER]}
    found = read_pairs(write(tmp_path / "rows.jsonl", [row]), tokenizer, DPODataConfig())
    expected = build_prompt(tokenizer, before)
    assert [example.prompt for example in found] == [expected] * 2
    assert [tokenizer.decode(example.response[:-1]) for example in found] == ["4", "3"]


def test_the_template_shows_the_tools_of_a_row(tiny_qwen2, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(tiny_qwen2)
    tokenizer.chat_template = (
        "{% for t in tools or [] %}{{ t.name }}{% endfor %}{{ messages[0].content }}"
    )
    row = {"prompt": "1+1=", "chosen": "2", "rejected": "3", "tools": [{"name": "+"}]}
    pair = read_pairs(write(tmp_path / "rows.jsonl", [row]), tokenizer, DPODataConfig())
    assert [tokenizer.decode(example.prompt) for example in pair] == ["+1+1=", "+1+1="]


def test_a_pair_that_is_longer_than_a_pass(tiny_qwen2, file, tmp_path, capsys):
    """The longest is 21+9=30 against 21+9=189: 5 tokens and 2 or 3, each with its end."""
    limit = "data.max_token_len_per_gpu="
    assert main(options(file, tiny_qwen2, tmp_path, limit + "16")) == 2
    expected = f"{limit}16 has no room for the longest row of data.train_files, which has 17 tokens"
    assert f"{expected}. Use at least 17" in capsys.readouterr().err


def test_check_explain_and_help(tiny_qwen2, file, tmp_path, capsys):
    right = options(file, tiny_qwen2, tmp_path / "run")
    result = CliRunner().invoke(app, ["check", "main_dpo", *right])
    assert result.exit_code == 0 and result.output.startswith("train: the first ")
    assert result.output.endswith("\nThe configuration is fine.\n")
    result = CliRunner().invoke(app, ["check", "main_dpo", *right, "data.chosen_key=better"])
    assert result.exit_code == 2 and "has no column 'better'" in result.stderr
    result = CliRunner().invoke(app, ["check", "main_dpo", *right, "beta=0"])
    assert result.exit_code == 2 and "beta=0.0\n    must be > 0" in result.stderr
    result = CliRunner().invoke(app, ["explain", "--dpo", "optim.lr"])
    assert "default 1e-06" in result.stdout
    with pytest.raises(SystemExit, match="^0$"):
        main(["--help"])
    assert "data.rejected_key: text (default rejected)" in capsys.readouterr().out
