"""Invalid command lines and files, with the messages they must give.

Each command is `python -m verlite.main_ppo --config-path . --config-name sums`, which is valid,
plus the overrides of the case. It runs in a folder with sums.yaml, its data and its model. The
case's `files` function changes that folder first.
"""

import fcntl
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tests.models import tiny_model
from tests.trainer.runs import driver_state, write_sums
from verlite.config.critical import critical_settings
from verlite.config.load import compose
from verlite.trainer import checkpoints
from verlite.trainer.launch import absolutize_paths

SUMS = """\
defaults: [grpo, _self_]
data:
  train_files: train.parquet
  train_batch_size: 8
  max_prompt_length: 8
  max_response_length: 8
actor_rollout_ref:
  model: {path: model}
  actor: {ppo_mini_batch_size: 8, ppo_micro_batch_size_per_gpu: 4}
  rollout: {name: hf, n: 4}
trainer:
  device: cpu
  n_gpus_per_node: 2
  total_training_steps: 1
  default_local_dir: run
"""
ACTOR, ROLLOUT = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."


@dataclass(frozen=True)
class Case:
    """One mistake."""

    mistake: str
    """A short description: the heading in the docs."""
    typed: str
    """Overrides, separated by spaces."""
    expected: tuple[str, ...]
    """Texts that the output must contain in this order: key or file, value, rule, remedy."""
    code: int = 2
    files: Callable[[], Callable[[], None] | None] | None = None
    """Changes the working directory. May return a function that undoes the change after the run."""
    source: str = ""
    """The text of reward.py, shown in the docs."""
    missing_package: str | None = None
    """A package to hide, as if it were not installed."""
    program: str = "python -m verlite.main_ppo"
    """The command. `verlite check` is for notes that are not errors. `verlite convert ...` gets
    nothing but `typed`."""
    config_name: str = "sums"
    whole_run: bool = False
    """True: the mistake is found after the workers start. The command runs in a new process."""

    @property
    def arguments(self) -> list[str]:
        if self.program.startswith("verlite convert"):
            return self.typed.split()
        return ["--config-path", ".", "--config-name", self.config_name, *self.typed.split()]


def write_folder(folder: Path) -> None:
    """Write the files of the valid command."""
    folder.mkdir()
    (folder / "sums.yaml").write_text(SUMS)
    write_sums(folder / "train.parquet", 64)
    tiny_model(folder / "model")


# --- changes to the files in the working directory ---

TRAIN, MODEL = Path("train.parquet"), Path("model")
Change = Callable[[], Callable[[], None] | None]
SILENT_PORT = 27163  # below the range of ephemeral ports


def every_row(**change: object) -> Change:
    """Change columns of train.parquet. None removes a column."""

    def write() -> None:
        rows = [row | change for row in pq.read_table(TRAIN).to_pylist()]
        left = [{name: value for name, value in row.items() if value is not None} for row in rows]
        pq.write_table(pa.Table.from_pylist(left), TRAIN)

    return write


def one_row(number: int, **change: object) -> Change:
    """Change values in one row of train.parquet."""

    def write() -> None:
        rows = pq.read_table(TRAIN).to_pylist()
        rows[number] |= change
        pq.write_table(pa.Table.from_pylist(rows), TRAIN)

    return write


def prompt(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def empty() -> None:
    pq.write_table(pq.read_table(TRAIN).slice(0, 0), TRAIN)


def not_parquet() -> None:
    TRAIN.write_text('{"prompt": "1+1="}\n' * 8)


def model_without(*patterns: str) -> Change:
    """Remove files from the model folder."""

    def remove() -> None:
        for pattern in patterns:
            for file in MODEL.glob(pattern):
                file.unlink()

    return remove


def reward(source: str) -> dict[str, Any]:
    """Return the fields of a case with this text in reward.py."""

    def write() -> None:
        Path("reward.py").write_text(source)

    return {"typed": "custom_reward_function.path=reward.py", "source": source, "files": write}


def scores(*lines: str) -> dict[str, Any]:
    """Return the fields of a case with this body of compute_score in reward.py."""
    return reward(
        "\n    ".join(
            ["def compute_score(data_source, solution_str, ground_truth, extra_info=None):", *lines]
        )
        + "\n"
    )


def directory_in_use() -> Callable[[], None]:
    """Lock the run directory as a running run does."""
    Path("run").mkdir()
    lock = Path("run/.lock").open("a+")
    fcntl.flock(lock, fcntl.LOCK_EX)
    lock.write(str(os.getpid()))
    lock.flush()
    return lock.close


def port_of_something_else() -> Callable[[], None]:
    """Open a port that accepts connections and never answers."""
    return socket.create_server(("127.0.0.1", SILENT_PORT), reuse_port=True).close


def checkpoint(**changed_settings: object) -> None:
    """Write a checkpoint of the valid command: the parts that are read before workers start."""
    config = absolutize_paths(compose("sums", config_dir=".").config)
    settings = critical_settings(config) | changed_settings
    sampler = {"seed": 42, "shuffle": True, "epoch": 2, "position": 32, "size": 64}

    def parts(folder: Path) -> None:
        (folder / "actor").mkdir()
        (folder / "actor" / "__0_0.distcp").write_bytes(b"weights")

    Path("run").mkdir()
    checkpoints.write(Path("run"), 20, driver_state(20, critical=settings, sampler=sampler), parts)


def damaged_checkpoint() -> None:
    checkpoint()
    Path("run/global_step_20/actor/__0_0.distcp").write_bytes(b"weight")


def fewer_rows_than_before() -> None:
    checkpoint()
    write_sums(TRAIN, 48)


CASES = (
    # the command line
    Case(
        "A key that does not exist",
        f"{ACTOR}ppo_epoch=2",
        (f"{ACTOR}ppo_epoch=2", "unknown key", f"Did you mean {ACTOR}ppo_epochs"),
    ),
    Case(
        "A key of another framework that is not supported",
        "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2",
        (
            "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2",
            "not supported",
            "FSDP2",
            "fsdp_config",
        ),
    ),
    Case(
        "A key without effect: the KL coefficient of a penalty that is off",
        "algorithm.kl_ctrl.kl_coef=0.1",
        (
            "no effect in this run: algorithm.kl_ctrl.kl_coef",
            "used only with algorithm.use_kl_in_reward=true",
            "actor.kl_loss_coef",
            "is fine",
        ),
        code=0,
        program="verlite check",
    ),
    Case(
        "A value of the wrong type",
        "trainer.nnodes=two",
        ("trainer.nnodes=two", "expected whole number, got text"),
    ),
    Case(
        "An argument without a value",
        "data.train_batch_size",
        ("data.train_batch_size", "is not an override", "key=value"),
    ),
    Case(
        "A list without brackets",
        "trainer.logger=console,wandb",
        ("trainer.logger=console,wandb", "trainer.logger=[console,wandb]"),
    ),
    Case(
        "A configuration file that does not exist",
        "",
        ("--config-name=summs", "summs.yaml was not found", "Available: ", "sums"),
        config_name="summs",
    ),
    Case(
        "Both keys for the micro-batch size",
        f"{ACTOR}ppo_micro_batch_size=8 {ACTOR}ppo_micro_batch_size_per_gpu=4",
        (
            f"{ACTOR}ppo_micro_batch_size=8",
            f"{ACTOR}ppo_micro_batch_size_per_gpu=4 is set too",
            f"Keep only {ACTOR}ppo_micro_batch_size_per_gpu",
        ),
    ),
    Case(
        "A missing micro-batch size",
        f"~{ACTOR}ppo_micro_batch_size_per_gpu",
        (f"{ACTOR}ppo_micro_batch_size_per_gpu", "must be given", "use_dynamic_bsz=true"),
    ),
    Case(
        "A mini-batch size that does not divide the batch size",
        f"{ACTOR}ppo_mini_batch_size=3",
        (f"{ACTOR}ppo_mini_batch_size=3", "does not divide data.train_batch_size=8", "2 or 4"),
    ),
    Case(
        "A mini-batch larger than the batch",
        f"{ACTOR}ppo_mini_batch_size=16",
        (f"{ACTOR}ppo_mini_batch_size=16", "more than data.train_batch_size=8", "8"),
    ),
    Case(
        "GRPO with one sample per prompt",
        f"{ROLLOUT}n=1",
        (f"{ROLLOUT}n=1", "algorithm.adv_estimator=grpo", "at least 2", "Use 4 to 16"),
    ),
    Case(
        "Training samples at temperature 0",
        f"{ROLLOUT}temperature=0",
        (f"{ROLLOUT}temperature=0", "must be > 0", "val_kwargs"),
    ),
    Case(
        "Two mistakes at once",
        f"{ROLLOUT}n=1 trainer.nnodes=two data.train_files=tain.parquet",
        ("3 problems", "trainer.nnodes=two", f"{ROLLOUT}n=1", "data.train_files=tain.parquet"),
    ),
    Case(
        "An unknown logger",
        "trainer.logger=[console,clearml]",
        ("trainer.logger=clearml", "is not a legal name", "wandb"),
    ),
    Case(
        "Validation only, without validation data",
        "trainer.val_only=true",
        ("trainer.val_only=true", "needs validation files", "data.val_files"),
    ),
    Case(
        "vLLM selected but not installed",
        f"{ROLLOUT}name=vllm",
        (f"{ROLLOUT}name=vllm", "vLLM is not installed here", "verlite[vllm]", f"{ROLLOUT}name=hf"),
        missing_package="vllm",
    ),
    # devices
    Case(
        "More GPUs than the machine has",
        "trainer.device=cuda trainer.n_gpus_per_node=8",
        (
            "trainer.n_gpus_per_node=8",
            "this machine has 0 visible GPUs",
            "trainer.device=cpu",
            "ray_kwargs.ray_init.address",
        ),
    ),
    Case(
        "A role on devices that do not exist",
        "cluster.component_placement={actor:0-1,rollout:2-3}",
        ("cluster.component_placement={actor:0-1,rollout:2-3}", "names device 3", "0-1"),
    ),
    Case(
        "More devices than CPU slots",
        "trainer.n_gpus_per_node=4 ray_kwargs.ray_init.num_cpus=2",
        ("ray_kwargs.ray_init.num_cpus=2", "less than the 4 devices", "at least 4"),
    ),
    Case(
        "A Ray cluster that does not answer",
        "ray_kwargs.ray_init.address=127.0.0.1:1 ray_kwargs.wait_s=1",
        (
            "ray_kwargs.ray_init.address=127.0.0.1:1",
            "Start the cluster",
            "ray_kwargs.ray_init.address=local",
            "ray_kwargs.wait_s",
        ),
    ),
    Case(
        "A Ray address whose port belongs to another program",
        f"ray_kwargs.ray_init.address=127.0.0.1:{SILENT_PORT} ray_kwargs.wait_s=1",
        (f"ray_kwargs.ray_init.address=127.0.0.1:{SILENT_PORT}", "Start the cluster"),
        files=port_of_something_else,
    ),
    Case(
        "The address of Ray's dashboard",
        "ray_kwargs.ray_init.address=http://127.0.0.1:8265",
        (
            "ray_kwargs.ray_init.address=http://127.0.0.1:8265",
            "must run inside the cluster",
            "ray job submit --address=http://127.0.0.1:8265",
        ),
    ),
    # data
    Case(
        "A missing training file",
        "data.train_files=tain.parquet",
        ("data.train_files=tain.parquet", "does not exist", "train.parquet"),
    ),
    Case(
        "An empty training file",
        "",
        ("data.train_files=train.parquet", "has no rows", "data_preprocess"),
        files=empty,
    ),
    Case(
        "A training file that is not parquet",
        "",
        ("data.train_files=train.parquet", "cannot be read as parquet", "data_preprocess"),
        files=not_parquet,
    ),
    Case(
        "A training file without a required column",
        "",
        (
            "data.train_files=train.parquet",
            "has no column 'reward_model'",
            "it has data_source, prompt",
            "data_preprocess",
        ),
        files=every_row(reward_model=None),
    ),
    Case(
        "Prompts in another column",
        "data.prompt_key=question",
        (
            "data.train_files=train.parquet",
            "has no column 'question'",
            "it has data_source, prompt",
            "data.prompt_key",
        ),
    ),
    Case(
        "A prompt that is not a list of messages",
        "",
        ("train.parquet row 0", "column 'prompt'", "'1+1='", "{role, content}", "data_preprocess"),
        files=every_row(prompt="1+1="),
    ),
    Case(
        "A row without a ground truth",
        "",
        (
            "train.parquet row 5",
            "column 'reward_model'",
            "None",
            "{style, ground_truth}",
            "data_preprocess",
        ),
        files=one_row(5, reward_model=None),
    ),
    Case(
        "A prompt that is too long",
        "data.truncation=error data.filter_overlong_prompts=false",
        (
            "train.parquet row 3",
            "12 tokens, 8 are allowed",
            "data.max_prompt_length",
            "1 of 64",
            "data.filter_overlong_prompts",
            "data.truncation",
        ),
        files=one_row(3, prompt=prompt("11111+11111=")),
    ),
    Case(
        "All prompts filtered as too long",
        "data.max_prompt_length=2 data.filter_overlong_prompts=true",
        (
            "data.train_files",
            "all 64 prompts",
            "data.max_prompt_length=2",
            "the shortest 4",
            "Raise data.max_prompt_length",
        ),
    ),
    Case(
        "Fewer rows than one batch",
        "data.train_batch_size=128",
        ("data.train_batch_size=128", "only 64 rows", "Use at most 64"),
    ),
    Case(
        "Fewer prompts than one batch after filtering",
        f"data.train_batch_size=64 {ACTOR}ppo_mini_batch_size=64 data.filter_overlong_prompts=true",
        ("data.train_batch_size=64", "63 training prompts", "Use at most 63"),
        files=one_row(3, prompt=prompt("11111+11111=")),
    ),
    Case(
        "A data source without a scorer",
        "",
        (
            "data.train_files=train.parquet",
            "no built-in reward function for data source 'my/sums'",
            "custom_reward_function.path",
            "openai/gsm8k",
        ),
        files=every_row(data_source="my/sums"),
    ),
    # the model
    Case(
        "A model path without a model",
        "actor_rollout_ref.model.path=.",
        ("actor_rollout_ref.model.path=.", "has no config.json", "save_pretrained"),
    ),
    Case(
        "A model folder without weights",
        "",
        ("actor_rollout_ref.model.path=model", "no weights"),
        files=model_without("*.safetensors"),
    ),
    Case(
        "A model folder without a tokenizer",
        "",
        (
            "actor_rollout_ref.model.path=model",
            "has no tokenizer",
            "tokenizer.json",
            "tokenizer_path",
        ),
        files=model_without("tokenizer*", "*.jinja"),
    ),
    Case(
        "More tokens than the model has positions",
        "data.max_response_length=4096",
        ("data.max_response_length=4096", "4104 tokens", "2048 positions"),
    ),
    # the reward function
    Case(
        "A missing reward file",
        "custom_reward_function.path=reward.py",
        ("custom_reward_function.path=reward.py", "does not exist"),
    ),
    Case(
        "A reward function with another name",
        **reward(
            "def score(data_source, solution_str, ground_truth, extra_info):\n    return 1.0\n"
        ),
        expected=(
            "custom_reward_function.name=compute_score",
            "reward.py does not define it",
            "It defines score",
        ),
    ),
    Case(
        "A reward file that imports a missing package",
        **reward("import sympyy\n\ndef compute_score(**row):\n    return 1.0\n"),
        expected=("reward.py cannot be loaded", "ModuleNotFoundError", "sympyy", "reward.py:1"),
    ),
    Case(
        "A reward function with other parameters",
        **reward("def compute_score(answer, truth):\n    return float(answer == truth)\n"),
        expected=(
            "reward.py",
            "compute_score(answer, truth)",
            "data_source, solution_str, ground_truth, extra_info",
            "**kwargs",
        ),
    ),
    Case(
        "A reward function that raises",
        **scores("raise ValueError(f'no answer in {solution_str!r}')"),
        expected=(
            "custom_reward_function.path=",
            "reward.py: compute_score",
            "8 rows",
            "line 2, in compute_score",
            "ValueError: no answer in",
            "reward.check_ground_truth=false",
        ),
    ),
    Case(
        "A reward function that returns None",
        **scores("solution_str == ground_truth"),
        expected=("reward.py", "returned None", "finite number"),
    ),
    Case(
        "A reward function that returns NaN",
        **scores("return float('nan')"),
        expected=("reward.py", "returned nan", "finite number"),
    ),
    Case(
        "A reward function that returns text",
        **scores("return '1.0'"),
        expected=("reward.py", "returned '1.0'", "finite number"),
    ),
    Case(
        "A reward function that returns a dict without a score",
        **scores("return {'accuracy': 1.0}"),
        expected=("reward.py", 'a dict without "score"', "accuracy"),
    ),
    Case(
        "A reward function that never returns",
        **(
            scores("while True:", "    pass")
            | {"typed": "custom_reward_function.path=reward.py reward.item_timeout_s=0.2"}
        ),
        expected=("reward.py", "no score within 0.2 s"),
    ),
    Case(
        "A reward function that raises during training",
        **(
            scores(
                "if solution_str != ground_truth:",
                "    raise ValueError(f'no number in {solution_str!r}')",
                "return 1.0",
            )
            | {"typed": "custom_reward_function.path=reward.py trainer.n_gpus_per_node=1"}
        ),
        expected=(
            "of this step's rewards failed",
            "reward.max_error_rate=0.05",
            "ValueError: no number in",
        ),
        code=1,
        whole_run=True,
    ),
    # the run directory and checkpoints
    Case(
        "A run directory inside a file",
        "trainer.default_local_dir=train.parquet/run",
        (
            "trainer.default_local_dir=train.parquet/run",
            "train.parquet is a file",
            "Choose another",
        ),
    ),
    Case(
        "A run directory that another run uses",
        "",
        ("trainer.default_local_dir=", "in use by process", "End that run"),
        files=directory_in_use,
    ),
    Case(
        "A checkpoint to resume that does not exist",
        "trainer.resume_mode=resume_path trainer.resume_from_path=run/global_step_7",
        (
            "trainer.resume_from_path=run/global_step_7",
            "does not exist",
            "trainer.resume_mode=auto",
        ),
    ),
    Case(
        "Resuming from the run directory instead of a checkpoint",
        "trainer.resume_mode=resume_path trainer.resume_from_path=run",
        (
            "trainer.resume_from_path=run",
            "is not a global_step_N folder",
            "It contains global_step_20",
        ),
        files=checkpoint,
    ),
    Case(
        "A damaged checkpoint",
        "trainer.resume_mode=resume_path trainer.resume_from_path=run/global_step_20",
        (
            "trainer.resume_from_path=run/global_step_20",
            "is damaged",
            "actor/__0_0.distcp",
            "6 bytes",
            "7",
            "trainer.resume_mode=auto",
        ),
        files=damaged_checkpoint,
    ),
    Case(
        "Only damaged checkpoints",
        "trainer.total_training_steps=40",
        (
            "no checkpoint in",
            "global_step_20",
            "actor/__0_0.distcp",
            "6 bytes",
            "7",
            "trainer.resume_mode=disable",
        ),
        files=damaged_checkpoint,
    ),
    Case(
        "Resuming with settings that change the results",
        f"trainer.total_training_steps=40 data.seed=7 {ROLLOUT}n=8",
        (
            f"{ROLLOUT}n: 4 in the checkpoint, 8 now",
            "data.seed: 42 in the checkpoint, 7 now",
            "Set them back",
            "trainer.resume_mode=disable",
        ),
        files=checkpoint,
    ),
    Case(
        "Resuming with different training data",
        "trainer.total_training_steps=40",
        (
            "64 training prompts",
            "data.train_files now has 48",
            "resume with the same data",
            "trainer.resume_mode=disable",
        ),
        files=fewer_rows_than_before,
    ),
    Case(
        "A search agent whose retriever does not answer",
        "max_turns=2 retriever.url=http://127.0.0.1:1/retrieve",
        (
            "the retriever at http://127.0.0.1:1/retrieve does not answer",
            "verlite serve retriever",
            "retriever.url",
        ),
    ),
    Case(
        "A reward service that does not answer",
        "reward.remote.url=http://127.0.0.1:1/get_reward",
        (
            "the reward service at http://127.0.0.1:1/get_reward does not answer",
            "verlite serve reward",
            "reward.remote.url",
        ),
    ),
    Case(
        "A command of OpenRLHF that cannot be converted",
        "-- --pretrain model --prompt_data train.jsonl --prompt_max_len 8 --generate_max_len 8 "
        "--remote_rm_url http://127.0.0.1:5001/get_reward --colocate_all_models "
        "--n_samples_per_prompt 8 --train_batch_size 100 --enable_ema",
        (
            "--enable_ema",
            "has no counterpart in verlite",
            "leave it out",
            "--train_batch_size=100",
            "must be divisible by n_samples_per_prompt=8",
        ),
        program="verlite convert openrlhf",
    ),
)
