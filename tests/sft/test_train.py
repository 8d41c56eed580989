"""Supervised fine-tuning: loss equal to transformers, learning, two ranks equal one rank."""

import json
import math
import subprocess
import sys
from dataclasses import fields, replace
from math import inf
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from tests import metrics_page
from tests.sft.rows import read_examples
from tests.trainer.test_stages import Screen
from verlite.cli import app
from verlite.config import load, sft
from verlite.config.commands import DPO, SFT
from verlite.config.critical import tuning_settings
from verlite.config.problems import ConfigError
from verlite.config.sft import SFTDataConfig
from verlite.control.commands import Do
from verlite.control.machine import Machine
from verlite.data.sampler import PromptSampler
from verlite.engine import family
from verlite.engine.fsdp import TrainEngine
from verlite.engine.micro import MicroBatching
from verlite.engine.process_group import single_process_group
from verlite.main_sft import main
from verlite.sft.data import Example
from verlite.sft.run import Run, save
from verlite.sft.train import build_batch, log_prob_sums, mean_loss, sft_loss
from verlite.spec.roles import FSDPSpec, ModelSpec, OptimSpec
from verlite.trainer import stop as stop_module
from verlite.trainer.checkpoints import CheckpointError
from verlite.trainer.metrics import Stopwatch
from verlite.trainer.stop import Stop

pytestmark = pytest.mark.process

SUMS = [
    {"prompt": f"{a}+{b}=", "response": str(a + b)} for a in range(0, 24, 3) for b in range(2, 10)
]
"""64 examples. Prompts have 4 or 5 tokens, responses 2 or 3."""


class Listening:
    """A tracker of the user's own."""

    steps: list[int] = []
    config: dict = {}

    def __init__(self, run):
        Listening.config = run.config

    def __call__(self, step, metrics):
        assert metrics["train/loss"] > 0
        self.steps.append(step)

    def finish(self): ...


def validation_loss(engine, examples, micro):
    return mean_loss(log_prob_sums(engine, examples, micro), examples)


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
    for example in examples:
        prompt, response = example.prompt, example.response
        labels = torch.tensor([[-100] * len(prompt) + response])
        with torch.no_grad():
            loss = model(input_ids=torch.tensor([prompt + response]), labels=labels).loss
        total += float(loss) * len(response)
        tokens += len(response)
    return total / tokens


@pytest.mark.parametrize("micro", [MicroBatching(max_tokens=4096), MicroBatching(max_tokens=17)])
def test_loss_equals_transformers_loss_on_responses(tiny_qwen2, sums, micro):
    tokenizer = AutoTokenizer.from_pretrained(tiny_qwen2)
    expected_examples = []
    for row in SUMS[::5]:
        response = [*tokenizer.encode(row["response"]), tokenizer.eos_token_id]
        example = Example(tokenizer.encode(row["prompt"]), response, [1] * len(response))
        expected_examples.append(example)
    for part in ("prompt", "response"):
        lengths = {len(getattr(example, part)) for example in expected_examples}
        assert len(lengths) == 2, "lengths differ"
    expected = transformers_loss(tiny_qwen2, expected_examples)
    examples = read_examples(str(sums), tokenizer, SFTDataConfig())[::5]
    with single_process_group():
        engine = TrainEngine(
            ModelSpec(path=tiny_qwen2), FSDPSpec(), OptimSpec(lr=1e-3), device="cpu"
        )
        assert validation_loss(engine, examples, micro) == pytest.approx(expected, abs=1e-5)
        found = engine.update(build_batch(examples), micro, 1.0, sft_loss)
        assert found["loss"] == pytest.approx(expected, abs=1e-5)
        assert found["tokens"] == sum(e.trained_tokens for e in expected_examples)
        assert validation_loss(engine, examples, micro) < expected


def plain_losses(path, batches, lr, betas, weight_decay, grad_clip):
    """Return the loss of each step of a loop that uses only torch and transformers.

    One example at a time; the mean is over the trained tokens of the batch.
    """
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=betas, weight_decay=weight_decay)
    losses = []
    for batch in batches:
        tokens = sum(sum(example.mask) for example in batch)
        total = 0.0
        for example in batch:
            ids = torch.tensor([example.prompt + example.response])
            mask = torch.tensor(([0] * len(example.prompt) + example.mask)[1:])
            logits = model(input_ids=ids).logits[0, :-1]
            each = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none")
            loss = (each * mask).sum() / tokens
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, model


def test_twenty_steps_equal_a_plain_loop(tiny_qwen2, tmp_path):
    """Conversations of one to three turns, in passes of at most 60 tokens."""
    rows = []
    for start in range(40):
        messages = []
        for turn in range(start % 3 + 1):
            messages.append({"role": "user", "content": f"{start}+{turn}="})
            messages.append({"role": "assistant", "content": str(start + turn)})
        rows.append({"messages": messages})
    file = tmp_path / "chats.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    options = run_options(
        file,
        tiny_qwen2,
        tmp_path / "run",
        "data.val_files=null",
        "data.train_batch_size=8",
        "data.max_token_len_per_gpu=60",
        "optim.lr=1e-3",
        "optim.weight_decay=0.1",
        "optim.lr_warmup_steps_ratio=0",
        "trainer.total_epochs=4",
    )
    assert main(options) == 0
    found = [line["train/loss"] for line in lines(tmp_path / "run")]
    config = load.compose(overrides=options, command=SFT).config
    examples = read_examples(str(file), AutoTokenizer.from_pretrained(tiny_qwen2), config.data)
    assert len({tuple(example.mask) for example in examples}) > 3, "masks differ"
    assert any(0 in example.mask for example in examples)
    order = PromptSampler(40, 8, config.trainer.seed)
    batches = [[examples[row] for row in order.next_batch()] for _ in range(20)]
    expected, model = plain_losses(
        tiny_qwen2, batches, 1e-3, tuple(config.optim.betas), 0.1, config.grad_clip
    )
    assert len(found) == 20 and found == pytest.approx(expected, abs=1e-5)
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "huggingface")
    for name, weight in model.state_dict().items():
        if "k_proj.bias" not in name:  # softmax ignores it, so its gradient is rounding only
            torch.testing.assert_close(trained.state_dict()[name], weight, atol=1e-4, rtol=0)


def weights(run_dir):
    return AutoModelForCausalLM.from_pretrained(run_dir / "huggingface").state_dict()


def numbers(run_dir):
    """Return what each step computed, without durations."""
    return [
        {key: value for key, value in line.items() if not key.startswith(("tim", "perf"))}
        for line in lines(run_dir)
    ]


@pytest.mark.parametrize("lora", [[], ["model.lora_rank=4"]], ids=["full", "lora"])
def test_stopped_run_resumes_to_the_same_numbers(
    tiny_qwen2, sums, tmp_path, capsys, lora, stopping
):
    """SIGTERM in the second of three epochs, between two checkpoints: exit code 75."""
    options = ["trainer.total_epochs=3", "trainer.save_freq=4", "trainer.test_freq=3", *lora]
    options += ["optim.lr_scheduler_type=cosine", "trainer.max_ckpt_to_keep=2"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert main(run_options(sums, tiny_qwen2, parts, *options)) == 75
    stopping.undo()
    assert not (parts / "huggingface").exists()
    printed = capsys.readouterr().out
    assert "stopped by SIGTERM after step 5 of 12" in printed
    assert f"Last checkpoint: {parts}/global_step_5" in printed
    assert main(run_options(sums, tiny_qwen2, whole, *options)) == 0
    capsys.readouterr()
    assert main(run_options(sums, tiny_qwen2, parts, *options)) == 0
    assert f"resumed from {parts}/global_step_5" in capsys.readouterr().out
    assert numbers(parts) == numbers(whole)
    for name, weight in weights(whole).items():
        assert torch.equal(weights(parts)[name], weight), name
    kept = sorted(path.name for path in parts.glob("global_step_*"))
    assert kept == ["global_step_12", "global_step_8"]
    assert main(run_options(sums, tiny_qwen2, parts, *options)) == 0
    assert "already complete" in capsys.readouterr().out
    assert main(run_options(sums, tiny_qwen2, parts, *options, "data.train_batch_size=8")) == 2
    assert "data.train_batch_size: 16 in the checkpoint, 8 now" in capsys.readouterr().err
    error = json.loads((parts / "error.json").read_text())
    assert error["exit_code"] == 2 and error["type"] == "RunRefused"
    assert error["where"] == "while starting"


@pytest.mark.parametrize(
    ("change", "command"),
    [
        ("model.custom_chat_template='{{ messages }}'", SFT),
        ("model.tokenizer_path=.", SFT),
        ("data.prompt_dict_keys=[a]", DPO),
        ("data.response_dict_keys=[a]", SFT),
        ("data.apply_chat_template_kwargs={a: 1}", DPO),
    ],
)
def test_settings_of_the_tokens_are_critical(tiny_qwen2, sums, tmp_path, change, command):
    def settings(*more):
        overrides = run_options(sums, tiny_qwen2, tmp_path, *more)
        return tuning_settings(load.compose(None, overrides, None, True, False, command).config)

    before, after = settings(), settings(change)
    assert [key for key in after if after[key] != before[key]] == [change.split("=")[0]]


def test_a_model_without_a_small_copy_is_warned_about_once(
    tiny_qwen2, sums, tmp_path, capfd, caplog, monkeypatch
):
    monkeypatch.setattr(family, "small_config", lambda config, **options: None)
    assert main(run_options(sums, tiny_qwen2, tmp_path, "trainer.total_training_steps=1")) == 0
    printed = " ".join("".join(capfd.readouterr()).split()) + caplog.text
    assert printed.count("no small copy of a qwen2 model can be built") == 1


def test_a_run_stops_before_its_time_is_over(tiny_qwen2, sums, tmp_path, capsys, monkeypatch):
    """And the next one says which keys are different."""
    machines, deadlines = [], iter([inf, inf, 0.0])
    wanted = Machine.step_wanted

    def step_wanted(machine, now):
        if machine.policy.deadline is not None:
            machine.policy = replace(machine.policy, deadline=next(deadlines))
            machines.append(machine)
        return wanted(machine, now)

    monkeypatch.setattr(Machine, "step_wanted", step_wanted)
    options = ["trainer.total_training_steps=4", "trainer.test_freq=2"]
    limited = [*options, "trainer.max_runtime=10m"]
    assert main(run_options(sums, tiny_qwen2, tmp_path, *limited)) == 75
    assert "stopped by trainer.max_runtime=10m after step 2 of 4" in capsys.readouterr().out
    last = lines(tmp_path)[-1]
    assert machines[2]._step_s >= last["timing_s/step"] + last["timing_s/testing"]
    options += ["optim.weight_decay=0.5"]
    assert main(run_options(sums, tiny_qwen2, tmp_path, *options)) == 0
    printed = capsys.readouterr().out
    assert "changed since the checkpoint's run: optim.weight_decay: 0.01 before, 0.5 now" in printed
    assert "trainer.max_runtime: '10m' before, None now" in printed
    assert printed.count("changed since") == 2
    segments = sorted(path.name for path in (tmp_path / "configs").iterdir())
    assert segments == ["from_step_1.yaml", "from_step_3.yaml"]
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3, 4]


def test_epochs_end_a_run_before_its_steps(tiny_qwen2, sums, tmp_path, capsys):
    """64 examples in batches of 16 are 4 steps an epoch; the schedule has 100, as in verl."""
    options = [
        "data.train_batch_size=16",
        "data.val_files=null",
        "trainer.total_epochs=2",
        "trainer.total_training_steps=100",
        "optim.lr_scheduler_type=cosine",
        "optim.lr_warmup_steps=0",
        "optim.min_lr_ratio=0",
        "trainer.save_freq=after_each_epoch",
    ]
    assert main(run_options(sums, tiny_qwen2, tmp_path, *options)) == 0
    rates = [line["train/lr"] for line in lines(tmp_path)]
    cosine = [3e-3 * (1 + math.cos(math.pi * step / 100)) / 2 for step in range(8)]
    assert rates == pytest.approx(cosine, rel=1e-9)
    saved = sorted(path.name for path in tmp_path.glob("global_step_*"))
    assert saved == ["global_step_4", "global_step_8"]
    ends = "trainer.total_epochs=2 (8 steps) ends the run, not trainer.total_training_steps=100"
    assert ends in capsys.readouterr().out


def test_commands_that_read_a_run_directory(tiny_qwen2, sums, tmp_path):
    run_dir = tmp_path / "run"
    options = ["trainer.total_epochs=1", "trainer.save_freq=2", "trainer.test_freq=2"]
    assert main(run_options(sums, tiny_qwen2, run_dir, *options)) == 0

    def verlite(*words):
        result = CliRunner().invoke(app, list(map(str, words)))
        assert result.exit_code == 0, result.output
        return result.output

    verlite("export", run_dir / "global_step_4", tmp_path / "exported", "--model", tiny_qwen2)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "exported").state_dict()
    for name, weight in weights(run_dir).items():
        assert torch.equal(again[name], weight), name
    shown = verlite("show", run_dir, "--val", "--count", 1)
    assert "val_step_4.jsonl: 1 of 16 samples" in shown and "trained" in shown
    assert "prompt " in verlite("show", run_dir, "--step", 1)
    curve = verlite("curve", run_dir)
    assert "loss of each step:" in curve and "loss on held-out examples:" in curve
    verlite("report", run_dir, "-o", tmp_path / "page.html")
    assert "train/loss" in (tmp_path / "page.html").read_text()


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
    written = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [metrics_page.documented(json.loads(line)) for line in written]


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
    assert "lr: 0.003  # command line" in config
    assert "lr_warmup_steps_ratio: 0.03\n" in config
    (tmp_path / "again.yaml").write_text(config)
    again = load.compose("again", config_dir=tmp_path, command=SFT)
    assert again.config == load.compose(overrides=options, command=SFT).config
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
                TrainEngine(model, FSDPSpec(), device="cpu"),
                examples,
                MicroBatching(max_tokens=4096),
            )
            for model in (
                ModelSpec(path=str(adapter.parent)),
                ModelSpec(path=tiny_qwen2, lora_adapter_path=str(adapter)),
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
        compared = {"train/loss", "train/grad_norm", "train/tokens", "train/lr", "val/loss"} & set(
            one
        )
        assert len(compared) >= 4
        for key in compared:
            assert two[key] == pytest.approx(one[key], rel=1e-4), key
    assert (tmp_path / "two" / "huggingface" / "model.safetensors").exists()


def test_all_invalid_keys_are_reported_together(capsys):
    with pytest.raises(ConfigError) as caught:
        load.compose(
            command=SFT,
            overrides=[
                "data.train_file=x",
                "optim.lr=fast",
                "trainer.device=tpu",
                "data.truncation=left",
                "model=x",
                "model.override_config.rope_theta=1e6",
            ],
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
        load.compose(
            command=SFT,
            overrides=[
                "data.train_files=x",
                "model.path=y",
                "trainer.device=tpu",
                "data.truncation=left",
                "trainer.test_freq=2",
            ],
        )
    assert {problem.key for problem in caught.value.problems} == {
        "data.train_files",
        "trainer.device",
        "data.truncation",
        "trainer.test_freq",
    }
    with pytest.raises(SystemExit, match="^2$"):
        main(["data.train_files=x"])
    assert "model.path" in capsys.readouterr().err


def test_saves_may_fail_for_two_minutes(tmp_path, monkeypatch):
    """As in RL training, a few failures in a row do not end a run whose steps are short."""

    def save_engine(folder):
        raise OSError("full")

    run = Run(**dict.fromkeys(field.name for field in fields(Run)))
    run.config, run.run_dir, run.stopwatch = sft.SFTConfig(), tmp_path, Stopwatch()
    run.config.trainer.save_freq = 1
    run.total_steps, run.display, run.step = 9, Screen(), 3
    run.engine, run.stop = SimpleNamespace(save=save_engine, device="cpu"), Stop(embedded=True)
    monkeypatch.setattr(Run, "state", lambda run: {})
    clock = iter([1000.0, 1001.0, 1002.0, 1119.9, 1120.0, 1121.0])
    now = [0.0]
    monkeypatch.setattr(stop_module, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def step():
        now[0] = next(clock)
        next(run.steps())
        run.tell(Machine.step_finished)
        assert run.tell(Machine.step_measured) is Do.SAVE
        save(run)
        run.tell(Machine.step_ends, 1.0)

    with single_process_group():
        run.begin(0)
        for _ in range(4):
            step()
        assert len(run.display) == 4 and "but not within 120 s of the first" in run.display[-1]
        with pytest.raises(CheckpointError, match="full"):
            step()
        run.step, now[0], run.stop = 6, 1119.0, Stop(embedded=True)
        run.begin(0)
        clock = iter([1120.0] * 3)
        step()
        step()
        with pytest.raises(CheckpointError, match="full"):  # there is no later save
            step()


def test_missing_file_exits_with_code_2(tiny_qwen2, tmp_path, capsys):
    with pytest.raises(SystemExit, match="^2$"):
        main(run_options(tmp_path / "gone.parquet", tiny_qwen2, tmp_path / "run"))
    printed = capsys.readouterr().err
    assert f"data.train_files={tmp_path}/gone.parquet" in printed and "does not exist" in printed
    assert not (tmp_path / "run").exists()


def test_help_lists_every_key(capsys):
    with pytest.raises(SystemExit, match="^0$"):
        main(["--help"])
    printed = capsys.readouterr().out
    assert "data.response_key: text (default response)\n    Column of the response" in printed
    assert "model.use_remove_padding: true/false" in printed
