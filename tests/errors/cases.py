"""Invalid command lines and files, with the messages they must give.

Each command is `python -m verlite.main_ppo --config-path . --config-name sums`, which is valid,
plus the overrides of the case; for supervised fine-tuning it is SFT with SFT_VALUES. It runs in a
folder with sums.yaml, its data and its model. The case's `files` function changes that folder
first.
"""

import fcntl
import json
import os
import shlex
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tests.models import tiny_model
from tests.rollout.fake_servers import FakeServer
from tests.trainer.runs import driver_state, write_sums
from verlite.config.critical import critical_settings
from verlite.config.load import compose
from verlite.trainer import checkpoints
from verlite.trainer.opening import absolutize_paths

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
SFT = "python -m verlite.main_sft"
SFT_VALUES = ("model.path=model", "trainer.device=cpu", "trainer.default_local_dir=run")
ACTOR, ROLLOUT = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."


@dataclass(frozen=True)
class Case:
    """One mistake."""

    mistake: str
    """A short description: the heading in the docs."""
    typed: str
    """Overrides as a shell reads them."""
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
        if self.program == SFT:
            return [*SFT_VALUES, *shlex.split(self.typed)]
        return ["--config-path", ".", "--config-name", self.config_name, *shlex.split(self.typed)]


def write_folder(folder: Path) -> None:
    """Write the files of the valid command."""
    folder.mkdir()
    (folder / "sums.yaml").write_text(SUMS)
    write_sums(folder / "train.parquet", 64)
    tiny_model(folder / "model")


# --- changes to the files in the working directory ---

TRAIN, MODEL = Path("train.parquet"), Path("model")
Change = Callable[[], Callable[[], None] | None]
OWN_DATA = """\
class Own:
    def __init__(self, files): ...
"""
OWN_SAMPLER = """\
class Own:
    def __init__(self, data_source, data_config):
        self.rows = len(data_source)

    def __iter__(self):
        return iter(range(self.rows))

    def update(self, batch): ...
"""
SILENT_PORT = 27163  # below the range of ephemeral ports
SERVER_PORT = 27164
SERVERS = f"{ROLLOUT}name=server {ROLLOUT}servers="


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


def generation_server(*missing: str, **settings: object) -> Change:
    """Start a generation server without these endpoints, or with these settings."""

    def start() -> Callable[[], None]:
        server = FakeServer(SERVER_PORT)
        server.missing.update(missing)
        server.settings.update(settings)
        return server.stop

    return start


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


def text(name: str, content: str) -> Change:
    """Write a text file."""

    def write() -> None:
        Path(name).write_text(content)

    return write


def renamed(name: str) -> Change:
    """Give train.parquet another name."""

    def rename() -> None:
        TRAIN.rename(name)

    return rename


def model_of_10_tokens() -> None:
    described = json.loads((MODEL / "config.json").read_text())
    (MODEL / "config.json").write_text(json.dumps(described | {"vocab_size": 10}))


def folder_with(*names: str) -> Change:
    """Create empty files, and the folders that contain them."""

    def write() -> None:
        for name in names:
            Path(name).parent.mkdir(parents=True, exist_ok=True)
            Path(name).touch()

    return write


def csv_file() -> None:
    Path("sums.csv").write_text("question,answer\n" + "1+1=,2\n" * 8)


def broken_lines() -> None:
    Path("sums.jsonl").write_text('{"prompt": "1+1="}\n{prompt: "1+2="}\n')


def lines_of(*rows: dict[str, Any]) -> Change:
    """Write rows.jsonl."""

    def write() -> None:
        Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    return write


def chat(*roles: str) -> dict[str, Any]:
    """Return a row with a conversation."""
    return {"messages": [{"role": role, "content": "12"} for role in roles]}


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
        "Training samples at temperature 0",
        f"{ROLLOUT}temperature=0",
        (f"{ROLLOUT}temperature=0", "must be > 0", "val_kwargs"),
    ),
    Case(
        "Two mistakes at once",
        f"{ROLLOUT}top_p=2 trainer.nnodes=two data.train_files=tain.parquet",
        ("3 problems", "trainer.nnodes=two", f"{ROLLOUT}top_p=2", "data.train_files=tain.parquet"),
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
    # what a shell leaves in a command, and what is copied from pages
    Case(
        "Spaces around the = sign",
        "data.train_batch_size = 8",
        ("data.train_batch_size = 8", "spaces around the = sign", "Write data.train_batch_size=8"),
    ),
    Case(
        "A key with dashes",
        "--data.train_batch_size=8",
        ("--data.train_batch_size=8", "unknown option", "Write keys without dashes: data.train_ba"),
    ),
    Case(
        "A variable that the shell did not expand",
        "'data.train_files=$DATA/train.parquet'",
        (
            "data.train_files=$DATA/train.parquet",
            "contains $DATA",
            "double quotes",
            "${oc.env:DATA}",
        ),
    ),
    Case(
        "An environment variable in braces",
        "'data.train_files=${DATA}/train.parquet'",
        ("data.train_files=${DATA}/train.parquet", "'DATA' not found", "${oc.env:DATA}"),
    ),
    Case(
        "An unexpanded variable in a name",
        "'trainer.experiment_name=run-$SLURM_JOB_ID'",
        (
            "trainer.experiment_name=run-$SLURM_JOB_ID",
            "which was not expanded",
            "${oc.env:SLURM_JOB_ID}",
            "is fine",
        ),
        code=0,
        program="verlite check",
    ),
    Case(
        "Quotes inside a value",
        r"""trainer.project_name=\"\'sums\'\" """,
        ("trainer.project_name='sums'", "quotes are part of the value", "one level", "is fine"),
        code=0,
        program="verlite check",
    ),
    Case(
        "Quotes around a whole override",
        "\"'data.train_batch_size=8'\"",
        ("'data.train_batch_size=8'", "quotes are part of the argument", "Remove one level"),
    ),
    Case(
        "Quotes around a list",
        r""""trainer.logger=\"['console','wandb']\"" """,
        ("trainer.logger=", "make it a text, not a list", "Write trainer.logger=[console,wandb]"),
    ),
    Case(
        "A space behind the backslash that continues a line",
        "trainer.total_training_steps=1 '\\'",
        ("is not an override", "a backslash continues only at the end of a line"),
    ),
    Case(
        "A dash from a word processor",
        f"{ACTOR}optim.lr=1e\u20136",
        (f"{ACTOR}optim.lr=1e\u20136", "typographic character", "Type dashes and quotes again"),
    ),
    Case(
        "A configuration named twice",
        "--config-name grpo",
        ("--config-name=grpo", "given twice", "Keep only one"),
    ),
    Case("A key without its section", "lr=1e-6", ("lr=1e-06", "unknown key", f"{ACTOR}optim.lr")),
    Case(
        "A key without a value",
        f"{ACTOR}optim.lr=",
        (f"{ACTOR}optim.lr=", "expected number", "Give a value after the = sign"),
    ),
    # numbers and names
    Case(
        "A whole number in scientific notation",
        "data.train_batch_size=1e3",
        ("data.train_batch_size=1000.0", "expected whole number", "Write 1000."),
    ),
    Case(
        "A comma in a large number",
        "data.max_response_length=1,024",
        ("data.max_response_length=1,024", "does not separate thousands", "length=1024"),
    ),
    Case(
        "A number with a suffix",
        "data.max_response_length=8k",
        ("data.max_response_length=8k", "expected whole number", "Write all digits, such as 8000."),
    ),
    Case(
        "A percentage",
        f"{ROLLOUT}gpu_memory_utilization=90%",
        (f"{ROLLOUT}gpu_memory_utilization=90%", "expected number", "Write the fraction 0.9."),
    ),
    Case(
        "A fraction given in percent",
        f"{ROLLOUT}gpu_memory_utilization=90",
        (f"{ROLLOUT}gpu_memory_utilization=90", "must be > 0 and < 1", "0.9 is 90%"),
    ),
    Case(
        "Python's None",
        "trainer.total_training_steps=None",
        (
            "trainer.total_training_steps=None",
            "expected whole number or null",
            "null in lower case",
        ),
    ),
    Case(
        "A name in capital letters",
        "algorithm.adv_estimator=GRPO",
        ("algorithm.adv_estimator=GRPO", "is not a legal name", "Did you mean grpo?"),
    ),
    Case(
        "PPO as an estimator",
        "algorithm.adv_estimator=ppo",
        ("algorithm.adv_estimator=ppo", "is not a legal name", "PPO with a critic is gae."),
    ),
    Case(
        "The name of a device that verlite calls otherwise",
        "trainer.device=gpu",
        ("trainer.device=gpu", "is not a legal name", "A GPU is called cuda."),
    ),
    Case(
        "A duration that cannot be read",
        "trainer.max_runtime=3hours",
        ("trainer.max_runtime=3hours", "is not a duration such as", "90m"),
    ),
    Case(
        "A learning rate that nobody uses",
        f"{ACTOR}optim.lr=0.1",
        (
            f"{ACTOR}optim.lr=0.1",
            "far from published values",
            "2e-7 to 3e-5",
            "Try 1e-6",
            "is fine",
        ),
        code=0,
        program="verlite check",
    ),
    Case(
        "An address without http",
        "reward.remote.url=127.0.0.1:5001",
        ("reward.remote.url=127.0.0.1:5001", "is not an http address", "http://127.0.0.1:5000/get"),
    ),
    # files of another kind
    Case(
        "A folder of data",
        "data.train_files=data",
        (
            "data.train_files=data",
            "is a folder, not a file",
            "Name its files: a.parquet, b.parquet",
        ),
        files=folder_with("data/a.parquet", "data/b.parquet"),
    ),
    Case(
        "A pattern of files",
        "'data.train_files=*.parquet'",
        ("data.train_files=*.parquet", "patterns are not expanded", "[train.parquet]"),
    ),
    Case(
        "A CSV file with other columns",
        "data.train_files=sums.csv",
        ("data.train_files=sums.csv", "has no column 'prompt'", "verlite data sums.csv"),
        files=csv_file,
    ),
    Case(
        "A line of a JSONL file that is not JSON",
        "data.train_files=sums.jsonl",
        ("data.train_files=sums.jsonl", "cannot be read as jsonl: line 2", "verlite data"),
        files=broken_lines,
    ),
    Case(
        "Empty ground truths",
        "",
        (
            "data.train_files=train.parquet: 1 of 64 rows have an empty ground truth",
            "the first is row 5",
            "Remove these rows",
            "is fine",
        ),
        code=0,
        program="verlite check",
        files=one_row(5, reward_model={"style": "rule", "ground_truth": ""}),
    ),
    Case(
        "Ground truths that are null",
        "",
        ("train.parquet row 0: reward_model.ground_truth is null", "Give the answer, drop the row"),
        program="verlite check",
        files=every_row(
            data_source="openai/gsm8k", reward_model={"style": "rule", "ground_truth": None}
        ),
    ),
    Case(
        "A parquet file with the suffix of another kind",
        "data.train_files=sums.jsonl",
        ("data.train_files=sums.jsonl", "is a parquet file: name it sums.parquet"),
        files=renamed("sums.jsonl"),
    ),
    Case(
        "The name of a data set on the hub",
        "data.train_files=openai/gsm8k",
        ("data.train_files=openai/gsm8k", "does not exist", "hf://datasets/openai/gsm8k/FILE"),
    ),
    Case(
        "The address of a data file",
        "data.train_files=s3://bucket/train.parquet",
        (
            "data.train_files=s3://bucket",
            "is an address, and data files must be here",
            "Download it",
        ),
    ),
    Case(
        "A file of a chat template in place of its text",
        "actor_rollout_ref.model.custom_chat_template=chat.jinja",
        ("custom_chat_template=chat.jinja", "is not a Jinja template", "$(cat chat.jinja)"),
        files=text("chat.jinja", "{{ messages[0].content }}"),
    ),
    Case(
        "Weights that Git LFS has not downloaded",
        "",
        ("actor_rollout_ref.model.path=model", "is a Git LFS pointer", "git lfs pull"),
        files=text("model/model.safetensors", "version https://git-lfs.github.com/spec/v1\n"),
    ),
    Case(
        "A tokenizer with more tokens than the model",
        "",
        (
            "train.parquet row 0",
            "token id 21, but the model has 10 tokens",
            "the tokenizer belongs to another model",
            "model.tokenizer_path",
        ),
        program="verlite check",
        files=model_of_10_tokens,
    ),
    Case(
        "A misspelled folder of a model",
        "actor_rollout_ref.model.path=models/qwen2",
        (
            "models/qwen2 is not a folder here",
            "The folder models here has qwen",
            "Correct the path",
        ),
        program="verlite check",
        files=folder_with("models/qwen/config.json"),
    ),
    Case(
        "A data set class with other parameters",
        "data.custom_cls.path=reward.py data.custom_cls.name=Own",
        ("data.custom_cls", "reward.py: Own must take data_files, config, split (docs/data.md)"),
        program="verlite check",
        source=OWN_DATA,
        files=text("reward.py", OWN_DATA),
    ),
    Case(
        "A curriculum sampler of verl's",
        "data.sampler.class_path=reward.py data.sampler.class_name=Own",
        ("data.sampler.class_name=Own in", "changes after each step (update)", "order(epoch)"),
        program="verlite check",
        source=OWN_SAMPLER,
        files=text("reward.py", OWN_SAMPLER),
    ),
    Case(
        "A file as the model",
        "actor_rollout_ref.model.path=model/config.json",
        (
            "actor_rollout_ref.model.path=model/config.json",
            "is a file, not a folder",
            "Give a folder",
        ),
    ),
    Case(
        "A LoRA adapter as the model",
        "actor_rollout_ref.model.path=adapter",
        ("actor_rollout_ref.model.path=adapter", "is a LoRA adapter", "base model", "lora_adapter"),
        files=folder_with("adapter/adapter_config.json", "adapter/adapter_model.safetensors"),
    ),
    Case(
        "A checkpoint as the model",
        "actor_rollout_ref.model.path=old/global_step_5",
        ("old/global_step_5", "is a checkpoint of training", "verlite export old/global_step_5"),
        files=folder_with("old/global_step_5/actor/__0_0.distcp"),
    ),
    Case(
        "A name on the hub without its owner",
        "actor_rollout_ref.model.path=Qwen2.5-0.5B",
        ("model.path=Qwen2.5-0.5B", "not a folder here", "OWNER/NAME", "is fine"),
        code=0,
        program="verlite check",
    ),
    Case(
        "A folder as the reward function",
        "custom_reward_function.path=model",
        (
            "custom_reward_function.path=model",
            "is a folder, not a Python file",
            "Give a Python file",
        ),
    ),
    Case(
        "An environment that Python does not find",
        "max_turns=2 env.name=maze_game:Maze",
        ("env.name=maze_game:Maze", "was not found on the Python path", "PYTHONPATH"),
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
    # generation servers
    Case(
        "Generation servers that do not run",
        f"{SERVERS}[http://127.0.0.1:1] {ROLLOUT}server_wait_s=0",
        (
            f"no generation server answers (how long a run waits: {ROLLOUT}server_wait_s=0)",
            "http://127.0.0.1:1",
            "verlite serve generation",
            f"{ROLLOUT}servers",
        ),
    ),
    Case(
        "A generation server with another model and shorter sequences",
        f"{SERVERS}[http://127.0.0.1:{SERVER_PORT}]",
        (
            f"http://127.0.0.1:{SERVER_PORT} cannot be used",
            "--max-model-len is 8, and sequences have up to 16 tokens",
            "its model has 151936 tokens in its vocabulary, and actor_rollout_ref.model.path 128",
        ),
        files=generation_server(max_model_len=8, vocab_size=151936),
    ),
    Case(
        "A generation server of another vLLM",
        f"{SERVERS}[http://127.0.0.1:{SERVER_PORT}]",
        (
            f"http://127.0.0.1:{SERVER_PORT} cannot be used",
            "/weight_info",
            "needs vLLM 0.32",
            "verlite serve generation",
        ),
        files=generation_server("/weight_info"),
    ),
    Case(
        "A vLLM server that was not started for training",
        f"{SERVERS}[http://127.0.0.1:{SERVER_PORT}]",
        (
            f"http://127.0.0.1:{SERVER_PORT} cannot be used",
            "verlite_settings",
            "verlite serve generation",
        ),
        files=generation_server("/collective_rpc"),
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
            "contents of data.train_files",
            "in the checkpoint",
            "now",
            "Set them back",
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
    # supervised fine-tuning
    Case(
        "Supervised fine-tuning: a file without responses",
        "data.train_files=train.parquet",
        (
            "train.parquet has no column 'response'",
            "Its columns: ",
            "data.prompt_key and data.response_key, or data.messages_key",
        ),
        program=SFT,
    ),
    Case(
        "Supervised fine-tuning: an example is too long",
        "data.train_files=rows.jsonl data.train_batch_size=1 data.max_length=8",
        (
            "rows.jsonl row 1: the example has 10 tokens, more than data.max_length=8",
            "data.truncation=right",
        ),
        program=SFT,
        files=lines_of(
            {"prompt": "1+1=", "response": "2"}, {"prompt": "10+10=", "response": "020"}
        ),
    ),
    Case(
        "Supervised fine-tuning: a conversation without an answer",
        "data.train_files=rows.jsonl data.train_batch_size=1",
        ("rows.jsonl row 0: no message has the role assistant", "nothing to learn"),
        program=SFT,
        files=lines_of(chat("user", "user")),
    ),
    Case(
        "Supervised fine-tuning: the chat template changes earlier turns",
        "data.train_files=rows.jsonl data.train_batch_size=1 "
        "'model.custom_chat_template=\"{% for m in messages %}"
        "{{ m.content if loop.last else m.content[:1] }}{% endfor %}\"'",
        (
            "rows.jsonl row 0: message 1: the chat template writes",
            "differently in the whole conversation",
            "{% generation %}",
        ),
        program=SFT,
        files=lines_of(chat("user", "assistant", "user", "assistant")),
    ),
    Case(
        "Supervised fine-tuning: fewer examples than a batch",
        "data.train_files=rows.jsonl data.train_batch_size=8",
        ("data.train_batch_size=8 is more than the 1 training rows", "Use at most 1"),
        program=SFT,
        files=lines_of({"prompt": "1+1=", "response": "2"}),
    ),
)
