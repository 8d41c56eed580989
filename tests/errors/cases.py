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
    Case("A key that does not exist", f"{ACTOR}ppo_epoch=2"),
    Case(
        "A key of another framework that is not supported",
        "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2",
    ),
    Case(
        "A key without effect: the KL coefficient of a penalty that is off",
        "algorithm.kl_ctrl.kl_coef=0.1",
        code=0,
        program="verlite check",
    ),
    Case("A value of the wrong type", "trainer.nnodes=two"),
    Case("An argument without a value", "data.train_batch_size"),
    Case("A list without brackets", "trainer.logger=console,wandb"),
    Case("A configuration file that does not exist", "", config_name="summs"),
    Case(
        "Both keys for the micro-batch size",
        f"{ACTOR}ppo_micro_batch_size=8 {ACTOR}ppo_micro_batch_size_per_gpu=4",
    ),
    Case("A missing micro-batch size", f"~{ACTOR}ppo_micro_batch_size_per_gpu"),
    Case("A mini-batch size that does not divide the batch size", f"{ACTOR}ppo_mini_batch_size=3"),
    Case("Training samples at temperature 0", f"{ROLLOUT}temperature=0"),
    Case(
        "Two mistakes at once", f"{ROLLOUT}top_p=2 trainer.nnodes=two data.train_files=tain.parquet"
    ),
    Case("An unknown logger", "trainer.logger=[console,clearml]"),
    Case("Validation only, without validation data", "trainer.val_only=true"),
    Case("vLLM selected but not installed", f"{ROLLOUT}name=vllm", missing_package="vllm"),
    # what a shell leaves in a command, and what is copied from pages
    Case("Spaces around the = sign", "data.train_batch_size = 8"),
    Case("A key with dashes", "--data.train_batch_size=8"),
    Case("A variable that the shell did not expand", "'data.train_files=$DATA/train.parquet'"),
    Case("An environment variable in braces", "'data.train_files=${DATA}/train.parquet'"),
    Case(
        "An unexpanded variable in a name",
        "'trainer.experiment_name=run-$SLURM_JOB_ID'",
        code=0,
        program="verlite check",
    ),
    Case(
        "Quotes inside a value",
        r"""trainer.project_name=\"\'sums\'\" """,
        code=0,
        program="verlite check",
    ),
    Case("Quotes around a whole override", "\"'data.train_batch_size=8'\""),
    Case("Quotes around a list", r""""trainer.logger=\"['console','wandb']\"" """),
    Case(
        "A space behind the backslash that continues a line", "trainer.total_training_steps=1 '\\'"
    ),
    Case("A dash from a word processor", f"{ACTOR}optim.lr=1e\u20136"),
    Case("A configuration named twice", "--config-name grpo"),
    Case("A key without its section", "lr=1e-6"),
    Case("A key without a value", f"{ACTOR}optim.lr="),
    # numbers and names
    Case("A whole number in scientific notation", "data.train_batch_size=1e3"),
    Case("A comma in a large number", "data.max_response_length=1,024"),
    Case("A number with a suffix", "data.max_response_length=8k"),
    Case("A percentage", f"{ROLLOUT}gpu_memory_utilization=90%"),
    Case("A fraction given in percent", f"{ROLLOUT}gpu_memory_utilization=90"),
    Case("Python's None", "trainer.total_training_steps=None"),
    Case("A name in capital letters", "algorithm.adv_estimator=GRPO"),
    Case("PPO as an estimator", "algorithm.adv_estimator=ppo"),
    Case("The name of a device that verlite calls otherwise", "trainer.device=gpu"),
    Case("A duration that cannot be read", "trainer.max_runtime=3hours"),
    Case(
        "A learning rate that nobody uses", f"{ACTOR}optim.lr=0.1", code=0, program="verlite check"
    ),
    Case("An address without http", "reward.remote.url=127.0.0.1:5001"),
    # files of another kind
    Case(
        "A folder of data",
        "data.train_files=data",
        files=folder_with("data/a.parquet", "data/b.parquet"),
    ),
    Case("A pattern of files", "'data.train_files=*.parquet'"),
    Case("A CSV file with other columns", "data.train_files=sums.csv", files=csv_file),
    Case(
        "A line of a JSONL file that is not JSON", "data.train_files=sums.jsonl", files=broken_lines
    ),
    Case(
        "Empty ground truths",
        "",
        code=0,
        program="verlite check",
        files=one_row(5, reward_model={"style": "rule", "ground_truth": ""}),
    ),
    Case(
        "Ground truths that are null",
        "",
        program="verlite check",
        files=every_row(
            data_source="openai/gsm8k", reward_model={"style": "rule", "ground_truth": None}
        ),
    ),
    Case(
        "A parquet file with the suffix of another kind",
        "data.train_files=sums.jsonl",
        files=renamed("sums.jsonl"),
    ),
    Case("The name of a data set on the hub", "data.train_files=openai/gsm8k"),
    Case("The address of a data file", "data.train_files=s3://bucket/train.parquet"),
    Case(
        "A file of a chat template in place of its text",
        "actor_rollout_ref.model.custom_chat_template=chat.jinja",
        files=text("chat.jinja", "{{ messages[0].content }}"),
    ),
    Case(
        "Weights that Git LFS has not downloaded",
        "",
        files=text("model/model.safetensors", "version https://git-lfs.github.com/spec/v1\n"),
    ),
    Case(
        "A tokenizer with more tokens than the model",
        "",
        program="verlite check",
        files=model_of_10_tokens,
    ),
    Case(
        "A misspelled folder of a model",
        "actor_rollout_ref.model.path=models/qwen2",
        program="verlite check",
        files=folder_with("models/qwen/config.json"),
    ),
    Case(
        "A data set class with other parameters",
        "data.custom_cls.path=reward.py data.custom_cls.name=Own",
        program="verlite check",
        source=OWN_DATA,
        files=text("reward.py", OWN_DATA),
    ),
    Case(
        "A curriculum sampler of verl's",
        "data.sampler.class_path=reward.py data.sampler.class_name=Own",
        program="verlite check",
        source=OWN_SAMPLER,
        files=text("reward.py", OWN_SAMPLER),
    ),
    Case("A file as the model", "actor_rollout_ref.model.path=model/config.json"),
    Case(
        "A LoRA adapter as the model",
        "actor_rollout_ref.model.path=adapter",
        files=folder_with("adapter/adapter_config.json", "adapter/adapter_model.safetensors"),
    ),
    Case(
        "A checkpoint as the model",
        "actor_rollout_ref.model.path=old/global_step_5",
        files=folder_with("old/global_step_5/actor/__0_0.distcp"),
    ),
    Case(
        "A name on the hub without its owner",
        "actor_rollout_ref.model.path=Qwen2.5-0.5B",
        code=0,
        program="verlite check",
    ),
    Case("A folder as the reward function", "custom_reward_function.path=model"),
    Case("An environment that Python does not find", "max_turns=2 env.name=maze_game:Maze"),
    # devices
    Case("More GPUs than the machine has", "trainer.device=cuda trainer.n_gpus_per_node=8"),
    Case(
        "A role on devices that do not exist", "cluster.component_placement={actor:0-1,rollout:2-3}"
    ),
    Case("More devices than CPU slots", "trainer.n_gpus_per_node=4 ray_kwargs.ray_init.num_cpus=2"),
    Case(
        "A Ray cluster that does not answer",
        "ray_kwargs.ray_init.address=127.0.0.1:1 ray_kwargs.wait_s=1",
    ),
    Case(
        "A Ray address whose port belongs to another program",
        f"ray_kwargs.ray_init.address=127.0.0.1:{SILENT_PORT} ray_kwargs.wait_s=1",
        files=port_of_something_else,
    ),
    Case("The address of Ray's dashboard", "ray_kwargs.ray_init.address=http://127.0.0.1:8265"),
    # generation servers
    Case(
        "Generation servers that do not run",
        f"{SERVERS}[http://127.0.0.1:1] {ROLLOUT}server_wait_s=0",
    ),
    Case(
        "A generation server with another model and shorter sequences",
        f"{SERVERS}[http://127.0.0.1:{SERVER_PORT}]",
        files=generation_server(max_model_len=8, vocab_size=151936),
    ),
    Case(
        "A generation server of another vLLM",
        f"{SERVERS}[http://127.0.0.1:{SERVER_PORT}]",
        files=generation_server("/weight_info"),
    ),
    Case(
        "A vLLM server that was not started for training",
        f"{SERVERS}[http://127.0.0.1:{SERVER_PORT}]",
        files=generation_server("/collective_rpc"),
    ),
    # data
    Case("A missing training file", "data.train_files=tain.parquet"),
    Case("An empty training file", "", files=empty),
    Case("A training file that is not parquet", "", files=not_parquet),
    Case("A training file without a required column", "", files=every_row(reward_model=None)),
    Case("Prompts in another column", "data.prompt_key=question"),
    Case("A prompt that is not a list of messages", "", files=every_row(prompt="1+1=")),
    Case("A row without a ground truth", "", files=one_row(5, reward_model=None)),
    Case(
        "A prompt that is too long",
        "data.truncation=error data.filter_overlong_prompts=false",
        files=one_row(3, prompt=prompt("11111+11111=")),
    ),
    Case(
        "All prompts filtered as too long",
        "data.max_prompt_length=2 data.filter_overlong_prompts=true",
    ),
    Case("Fewer rows than one batch", "data.train_batch_size=128"),
    Case(
        "Fewer prompts than one batch after filtering",
        f"data.train_batch_size=64 {ACTOR}ppo_mini_batch_size=64 data.filter_overlong_prompts=true",
        files=one_row(3, prompt=prompt("11111+11111=")),
    ),
    Case("A data source without a scorer", "", files=every_row(data_source="my/sums")),
    # the model
    Case("A model path without a model", "actor_rollout_ref.model.path=."),
    Case("A model folder without weights", "", files=model_without("*.safetensors")),
    Case("A model folder without a tokenizer", "", files=model_without("tokenizer*", "*.jinja")),
    Case("More tokens than the model has positions", "data.max_response_length=4096"),
    # the reward function
    Case("A missing reward file", "custom_reward_function.path=reward.py"),
    Case(
        "A reward function with another name",
        **reward(
            "def score(data_source, solution_str, ground_truth, extra_info):\n    return 1.0\n"
        ),
    ),
    Case(
        "A reward file that imports a missing package",
        **reward("import sympyy\n\ndef compute_score(**row):\n    return 1.0\n"),
    ),
    Case(
        "A reward function with other parameters",
        **reward("def compute_score(answer, truth):\n    return float(answer == truth)\n"),
    ),
    Case(
        "A reward function that raises",
        **scores("raise ValueError(f'no answer in {solution_str!r}')"),
    ),
    Case("A reward function that returns None", **scores("solution_str == ground_truth")),
    Case("A reward function that returns NaN", **scores("return float('nan')")),
    Case("A reward function that returns text", **scores("return '1.0'")),
    Case(
        "A reward function that returns a dict without a score",
        **scores("return {'accuracy': 1.0}"),
    ),
    Case(
        "A reward function that never returns",
        **(
            scores("while True:", "    pass")
            | {"typed": "custom_reward_function.path=reward.py reward.item_timeout_s=0.2"}
        ),
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
        code=1,
        whole_run=True,
    ),
    # the run directory and checkpoints
    Case("A run directory inside a file", "trainer.default_local_dir=train.parquet/run"),
    Case("A run directory that another run uses", "", files=directory_in_use),
    Case(
        "A checkpoint to resume that does not exist",
        "trainer.resume_mode=resume_path trainer.resume_from_path=run/global_step_7",
    ),
    Case(
        "Resuming from the run directory instead of a checkpoint",
        "trainer.resume_mode=resume_path trainer.resume_from_path=run",
        files=checkpoint,
    ),
    Case(
        "A damaged checkpoint",
        "trainer.resume_mode=resume_path trainer.resume_from_path=run/global_step_20",
        files=damaged_checkpoint,
    ),
    Case("Only damaged checkpoints", "trainer.total_training_steps=40", files=damaged_checkpoint),
    Case(
        "Resuming with settings that change the results",
        f"trainer.total_training_steps=40 data.seed=7 {ROLLOUT}n=8",
        files=checkpoint,
    ),
    Case(
        "Resuming with different training data",
        "trainer.total_training_steps=40",
        files=fewer_rows_than_before,
    ),
    Case(
        "A search agent whose retriever does not answer",
        "max_turns=2 retriever.url=http://127.0.0.1:1/retrieve",
    ),
    Case(
        "A reward service that does not answer", "reward.remote.url=http://127.0.0.1:1/get_reward"
    ),
    Case(
        "A command of OpenRLHF that cannot be converted",
        "-- --pretrain model --prompt_data train.jsonl --prompt_max_len 8 --generate_max_len 8 "
        "--remote_rm_url http://127.0.0.1:5001/get_reward --colocate_all_models "
        "--n_samples_per_prompt 8 --train_batch_size 100 --enable_ema",
        program="verlite convert openrlhf",
    ),
    # supervised fine-tuning
    Case(
        "Supervised fine-tuning: a file without responses",
        "data.train_files=train.parquet",
        program=SFT,
    ),
    Case(
        "Supervised fine-tuning: an example is too long",
        "data.train_files=rows.jsonl data.train_batch_size=1 data.max_length=8",
        program=SFT,
        files=lines_of(
            {"prompt": "1+1=", "response": "2"}, {"prompt": "10+10=", "response": "020"}
        ),
    ),
    Case(
        "Supervised fine-tuning: a conversation without an answer",
        "data.train_files=rows.jsonl data.train_batch_size=1",
        program=SFT,
        files=lines_of(chat("user", "user")),
    ),
    Case(
        "Supervised fine-tuning: the chat template changes earlier turns",
        "data.train_files=rows.jsonl data.train_batch_size=1 "
        "'model.custom_chat_template=\"{% for m in messages %}"
        "{{ m.content if loop.last else m.content[:1] }}{% endfor %}\"'",
        program=SFT,
        files=lines_of(chat("user", "assistant", "user", "assistant")),
    ),
    Case(
        "Supervised fine-tuning: fewer examples than a batch",
        "data.train_files=rows.jsonl data.train_batch_size=8",
        program=SFT,
        files=lines_of({"prompt": "1+1=", "response": "2"}),
    ),
)
