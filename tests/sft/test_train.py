"""Supervised fine-tuning: loss equal to transformers, learning, two ranks equal one rank."""

import json
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from verlite.config.problems import ConfigError
from verlite.config.schema import FSDPConfig, ModelConfig, OptimConfig
from verlite.config.sft import SFTDataConfig, compose
from verlite.engine.fsdp import TrainEngine
from verlite.engine.micro import MicroBatching
from verlite.engine.process_group import single_process_group
from verlite.main_sft import main
from verlite.sft.data import read_examples
from verlite.sft.train import build_batch, sft_loss, validation_loss

pytestmark = pytest.mark.process

SUMS = [
    {"prompt": f"{a}+{b}=", "response": str(a + b)} for a in range(0, 24, 3) for b in range(2, 10)
]
"""64 examples. Prompts have 4 or 5 tokens, responses 2 or 3."""


class Listening:
    """A tracker of the user's own."""

    steps: list[int] = []
    config: dict = {}

    def __init__(self, project, name, directory, config):
        Listening.config = config

    def __call__(self, step, metrics):
        assert metrics["train/loss"] > 0
        self.steps.append(step)

    def finish(self): ...


@pytest.fixture
def sums(tmp_path):
    pq.write_table(pa.Table.from_pylist(SUMS), tmp_path / "sums.parquet")
    return tmp_path / "sums.parquet"


def transformers_loss(path, examples):
    """Return transformers' mean label loss over response tokens, in float64, one example at a time.

    Prompt tokens have the label -100.
    """
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    total = 0.0
    tokens = 0
    for prompt, response in examples:
        labels = torch.tensor([[-100] * len(prompt) + response])
        with torch.no_grad():
            loss = model(input_ids=torch.tensor([prompt + response]), labels=labels).loss
        total += float(loss) * len(response)
        tokens += len(response)
    return total / tokens


@pytest.mark.parametrize("micro", [MicroBatching(max_tokens=4096), MicroBatching(max_tokens=17)])
def test_loss_equals_transformers_loss_on_responses(tiny_qwen2, sums, micro):
    tokenizer = AutoTokenizer.from_pretrained(tiny_qwen2)
    expected_examples = [
        (
            tokenizer.encode(row["prompt"]),
            [*tokenizer.encode(row["response"]), tokenizer.eos_token_id],
        )
        for row in SUMS[::5]
    ]
    for part in zip(*expected_examples, strict=True):
        assert len({len(ids) for ids in part}) == 2, "lengths differ"
    expected = transformers_loss(tiny_qwen2, expected_examples)
    examples = read_examples(str(sums), tokenizer, SFTDataConfig())[::5]
    with single_process_group():
        engine = TrainEngine(
            ModelConfig(path=tiny_qwen2), FSDPConfig(), OptimConfig(lr=1e-3), device="cpu"
        )
        assert validation_loss(engine, examples, micro) == pytest.approx(expected, abs=1e-5)
        found = engine.update(build_batch(examples), micro, 1.0, sft_loss)
        assert found["loss"] == pytest.approx(expected, abs=1e-5)
        assert found["train/tokens"] == sum(len(response) for _, response in expected_examples)
        assert validation_loss(engine, examples, micro) < expected


def run_options(sums, model, run_dir, *more):
    return [
        f"data.train_files={sums}",
        f"data.val_files={sums}",
        f"model.path={model}",
        f"trainer.default_local_dir={run_dir}",
        "data.train_batch_size=16",
        "optim.lr=3e-3",
        "optim.lr_scheduler_type=constant",
        "trainer.device=cpu",
        *more,
    ]


def lines(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_command_learns_and_writes_a_transformers_model(tiny_qwen2, sums, tmp_path, capsys):
    run_dir = tmp_path / "run"
    options = run_options(
        sums,
        tiny_qwen2,
        run_dir,
        "trainer.total_epochs=10",
        "trainer.test_freq=20",
        f"trainer.logger=[console,file,{__name__}:Listening]",
    )
    assert main(options) == 0
    steps = lines(run_dir)
    assert [line["step"] for line in steps] == list(range(1, 41)) and steps[-1]["train/epoch"] == 9
    assert [line["step"] for line in steps if "val/loss" in line] == [20, 40]
    assert Listening.steps == list(range(1, 41)) and Listening.config["optim"]["lr"] == 0.003
    assert steps[-1]["val/loss"] < 0.7 * steps[0]["train/loss"]
    assert "step 40/40" in capsys.readouterr().out
    config = (run_dir / "config.yaml").read_text()
    assert (
        "lr: 0.003  # command line" in config
        and "lr_warmup_steps_ratio: 0.03  # sft.yaml" in config
    )
    (tmp_path / "again.yaml").write_text(config)
    again = compose("again", config_dir=tmp_path)
    assert again.config == compose(overrides=options).config
    exported = run_dir / "huggingface"
    examples = read_examples(str(sums), AutoTokenizer.from_pretrained(exported), SFTDataConfig())
    assert transformers_loss(exported, examples) == pytest.approx(steps[-1]["val/loss"], abs=1e-4)


def test_lora_learns_and_writes_adapter_and_merged_model(tiny_qwen2, sums, tmp_path, capsys):
    code = main(
        run_options(
            sums,
            tiny_qwen2,
            tmp_path / "run",
            "model.lora_rank=8",
            "model.target_modules=[q_proj,v_proj,up_proj]",
        )
    )
    assert code == 0, capsys.readouterr()
    steps = lines(tmp_path / "run")
    assert "val/loss" in steps[-1] and not any("val/loss" in line for line in steps[:-1])
    losses = [line["train/loss"] for line in steps]
    assert losses[-1] < 0.9 * losses[0]
    examples = read_examples(str(sums), AutoTokenizer.from_pretrained(tiny_qwen2), SFTDataConfig())
    adapter = tmp_path / "run" / "huggingface" / "lora_adapter"
    with single_process_group():
        merged, adapted = (
            validation_loss(
                TrainEngine(model, FSDPConfig(), device="cpu"),
                examples,
                MicroBatching(max_tokens=4096),
            )
            for model in (
                ModelConfig(path=str(adapter.parent)),
                ModelConfig(path=tiny_qwen2, lora_adapter_path=str(adapter)),
            )
        )
    assert merged == pytest.approx(adapted, abs=1e-5) and merged < losses[0]


@pytest.mark.parametrize("sharing", [1, 2])
def test_two_ranks_equal_one_rank(tiny_qwen2, sums, tmp_path, sharing):
    """Also if both compute each example together, and count examples instead of tokens."""
    several = [f"ulysses_sequence_parallel_size={sharing}"]
    if sharing > 1:
        several.append("data.micro_batch_size_per_gpu=3")
    options = [
        "trainer.total_training_steps=4",
        "trainer.test_freq=2",
        "data.train_batch_size=15",
    ]  # 8 rows for one rank, 7 for the other
    assert main(run_options(sums, tiny_qwen2, tmp_path / "one", *options)) == 0
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        "2",
        "-m",
        "verlite.main_sft",
    ]
    done = subprocess.run(
        [*command, *run_options(sums, tiny_qwen2, tmp_path / "two", *options, *several)],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("step 4/4") == 1
    for one, two in zip(lines(tmp_path / "one"), lines(tmp_path / "two"), strict=True):
        assert two == pytest.approx(one, rel=1e-4)
    assert (tmp_path / "two" / "huggingface" / "model.safetensors").exists()


def test_all_invalid_keys_are_reported_together(capsys):
    with pytest.raises(ConfigError) as caught:
        compose(
            overrides=[
                "data.train_file=x",
                "optim.lr=fast",
                "trainer.device=tpu",
                "data.truncation=left",
                "model=x",
                "model.override_config.rope_theta=1e6",
            ]
        )
    by_key = {problem.key: problem for problem in caught.value.problems}
    assert set(by_key) == {
        "data.train_file",
        "optim.lr",
        "trainer.device",
        "data.truncation",
        "model",
        "model.path",
    }
    assert "data.train_files" in by_key["data.train_file"].remedy
    assert by_key["optim.lr"].rule == "expected number, got text"
    with pytest.raises(ConfigError) as caught:
        compose(
            overrides=[
                "data.train_files=x",
                "model.path=y",
                "trainer.device=tpu",
                "data.truncation=left",
                "trainer.test_freq=2",
            ]
        )
    assert {problem.key for problem in caught.value.problems} == {
        "data.train_files",
        "trainer.device",
        "data.truncation",
        "trainer.test_freq",
    }
    assert main(["data.train_files=x"]) == 2
    assert "model.path" in capsys.readouterr().err


def test_missing_file_exits_with_code_2(tiny_qwen2, tmp_path, capsys):
    assert main(run_options(tmp_path / "gone.parquet", tiny_qwen2, tmp_path / "run")) == 2
    printed = capsys.readouterr().err
    assert f"data.train_files={tmp_path}/gone.parquet" in printed and "does not exist" in printed
    assert not (tmp_path / "run").exists()


def test_help_lists_every_key(capsys):
    assert main(["--help"]) == 0
    printed = capsys.readouterr().out
    assert "data.response_key: text (default response)\n    Column of the response" in printed
    assert "model.use_remove_padding: true/false" in printed
