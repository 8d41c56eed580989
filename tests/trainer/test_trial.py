"""What `verlite check` finds by trying: the same messages as a run, without Ray."""

import json
import os
import shutil
import sys
from collections import namedtuple
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.errors.cases import write_folder
from tests.models import tiny_model
from verlite import hub
from verlite.config import compose
from verlite.config.critical import critical_settings
from verlite.config.problems import ConfigError
from verlite.data.sampler import PromptSampler
from verlite.trainer import checkpoints, disk, opening
from verlite.trainer.opening import absolutize_paths, lock_run_dir, try_rl
from verlite.trainer.preflight import Findings

AWAY = "http://127.0.0.1:1"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trial") / "made"
    write_folder(folder)
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory: sums.yaml, train.parquet, model/."""
    monkeypatch.chdir(shutil.copytree(made, tmp_path / "sums"))
    monkeypatch.setattr(hub, "unreachable", lambda: "no network")
    return Path()


def tried(*overrides: str) -> Findings:
    loaded = compose("sums", overrides, ".")
    return try_rl(loaded.config)


def test_a_good_command(folder: Path) -> None:
    trial = tried()
    assert (trial.errors, trial.warnings) == ([], [])
    assert trial.seen == [
        "train: 64 prompts from train.parquet; prompt tokens 4 to 4 (median 4, p90 4), limit 8"
    ]
    assert not Path("run").exists()


def test_the_critics_model_is_found_as_the_actors_is(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without critic.model.path it is the actor's, which may be relative or below the home."""
    monkeypatch.setenv("HOME", os.getcwd())
    for path in ("~/model", "model"):
        trial = tried(f"actor_rollout_ref.model.path={path}", "algorithm.adv_estimator=gae")
        assert trial.errors == []
    config = compose("sums", ["algorithm.adv_estimator=gae"], ".").config
    plan = opening.rl_preflight(config).plan
    assert plan is not None and plan.critic_model_path == str(Path("model").absolute())


def test_all_errors_are_found(folder: Path) -> None:
    """Each is what the run itself would say."""
    Path("reward.py").write_text("import nowhere\ndef compute_score(**row): ...\n")
    trial = tried("custom_reward_function.path=reward.py", "data.max_prompt_length=3")
    reward, prompts = trial.errors
    assert "reward.py cannot be loaded: ModuleNotFoundError: No module named 'nowhere'" in reward
    assert "row 0: the prompt has 4 tokens, 3 are allowed by data.max_prompt_length" in prompts
    assert "64 of 64 prompts (100%) are too long; prompt tokens 4 to 4" in prompts


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ("[1, 2, 3]", "data.train_batch_size=8 is more than the 3 training prompts"),
        ("range(8 + epoch)", None),
        ("[99]", "order(0) must be a list of row numbers from 0 to 63, not [99]"),
    ],
)
def test_the_users_order(folder: Path, rows: str, words: str | None) -> None:
    """The sampler is the run's: it must fill a batch."""
    Path("own_order.py").write_text(
        "class Own:\n    def __init__(self, **given): ...\n"
        f"    def order(self, epoch): return {rows}\n"
    )
    trial = tried("data.sampler.class_path=own_order.py", "data.sampler.class_name=Own")
    assert [words in error for error in trial.errors] == [True] * (words is not None)


def test_an_order_of_the_first_rows(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch may have more rows than were tried."""
    monkeypatch.setattr(opening, "ROWS", 5)
    trial = tried()
    assert trial.errors == [] and "tried on the first 5 of 64 rows" in trial.seen[0]


def test_a_tokenizer_without_template(folder: Path) -> None:
    Path("model/chat_template.jinja").unlink()
    assert "no chat template, so a prompt is the text of its messages" in tried().seen[-1]
    Path("agent.py").touch()
    trial = tried(f"agent.command='{sys.executable} agent.py'")
    assert "the program's chat/completions are refused" in trial.seen[-1] and not trial.errors


def test_a_program_in_the_home_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run has no shell that knows ~."""
    monkeypatch.setenv("HOME", str(folder))
    Path("agent.py").touch()
    with pytest.raises(ConfigError, match=r"~/agent\.py is not there: .* without a shell"):
        tried(f"agent.command='{sys.executable} ~/agent.py'")


def test_a_tokenizer_of_another_model(folder: Path) -> None:
    config = json.loads(Path("model/config.json").read_text())
    Path("model/config.json").write_text(json.dumps(config | {"vocab_size": 10}))
    (error,) = tried().errors
    assert "train.parquet row 0: the prompt has token id" in error
    assert "the model has 10 tokens, ids 0 to 9" in error


def test_a_model_that_the_engine_cannot_train(folder: Path) -> None:
    """The run's workers would refuse it."""
    shutil.rmtree("model")
    tiny_model(Path("model"), "gemma2")
    (error,) = tried().errors
    assert error.startswith("actor_rollout_ref.model.path=") and "cannot be trained" in error


def test_a_missing_folder_that_looks_like_a_name_on_the_hub(folder: Path) -> None:
    key = "actor_rollout_ref.model.path"
    trial = tried(f"{key}=models/nope")
    assert trial.errors == trial.seen == []
    (warning,) = trial.warnings
    assert warning.startswith(f"{key}=models/nope is not a folder here, and the hub at https://")
    assert "cannot be reached (no network)" in warning and warning.endswith("were not tried")
    for name in ("qwen", "llama"):
        Path("models", name).mkdir(parents=True)
    trial = tried(f"{key}=models/nope")
    assert trial.warnings == []
    assert "The folder models here has llama, qwen. Correct the path" in trial.errors[0]


def test_too_little_space(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """64 rows in steps of 8, twice, saved after every 5th and the last: 5, 10, 15, 16."""
    several = ("trainer.total_training_steps=null", "trainer.total_epochs=2", "trainer.save_freq=5")
    size = disk.checkpoint_bytes("model", "float32")

    def free(size: int) -> None:
        usage = namedtuple("usage", "free")(size)
        monkeypatch.setattr(disk.shutil, "disk_usage", lambda path: usage)

    free(4 * size)
    assert tried(*several).warnings == []
    free(4 * size - 1)
    (warning,) = tried(*several).warnings
    assert "up to 4 are kept (trainer.save_freq=5, trainer.max_actor_ckpt_to_keep=null)" in warning
    assert "Lower trainer.max_actor_ckpt_to_keep" in warning
    # A new one is written before the oldest is deleted.
    free(2 * size)
    assert tried(*several, "trainer.max_actor_ckpt_to_keep=1").warnings == []
    assert len(tried(*several, "trainer.max_actor_ckpt_to_keep=2").warnings) == 1
    # Those of a run to resume have their space.
    for step in (5, 10):
        Path(f"run/global_step_{step}").mkdir(parents=True)
    assert checkpoints.steps_on_disk(Path("run")) == [5, 10]
    assert tried(*several).warnings == []
    free(size - 1)
    assert "Free some space" in tried(*several).warnings[0]


def test_checkpoint_bytes_are_those_of_weights_and_two_moments(folder: Path) -> None:
    weights = Path("model/model.safetensors").stat().st_size  # float32, and a header
    size = disk.checkpoint_bytes("model", "float32")
    assert 3 * (weights - 10_000) < size < 3 * weights
    assert disk.checkpoint_bytes("model", "bfloat16") * 2 == size
    Path("model/model.safetensors").write_bytes(b"\xff" * 100)
    assert disk.checkpoint_bytes("model", "float32") == 0


CHECKPOINT = Path("run/global_step_3")


def write_checkpoint(**critical: object) -> None:
    """Write a complete checkpoint of the command, as far as the driver reads it."""
    config = absolutize_paths(compose("sums", (), ".").config)
    order = PromptSampler(64, 8, config.data.seed, config.data.shuffle)
    state = {
        "step": 3,
        "version": 4,
        "sampler": order.state_dict(),
        "kl_controller": {"value": 0.0},
        "metrics": {},
        "critical": critical_settings(config) | critical,
        "model": {},
    }
    CHECKPOINT.mkdir(parents=True)
    (CHECKPOINT / "state.json").write_text(json.dumps(state))
    manifest = checkpoints.make_manifest(CHECKPOINT)
    (CHECKPOINT / "manifest.json").write_text(json.dumps(manifest))


def files_of_run() -> dict[str, str]:
    return {str(file): file.read_text() for file in Path("run").rglob("*") if file.is_file()}


def test_a_checkpoint_of_another_batch_size(folder: Path) -> None:
    """The run would end with 2, so check does, and leaves the disk as it is."""
    write_checkpoint()
    Path("run/.tmp_global_step_4").mkdir()
    before = files_of_run()
    assert tried("trainer.total_training_steps=9").errors == []
    (error,) = tried("data.train_batch_size=16").errors
    assert "data.train_batch_size: 8 in the checkpoint, 16 now" in error
    assert "trainer.resume_mode=disable" in error
    assert tried("data.train_batch_size=16", "trainer.resume_mode=disable").errors == []
    assert files_of_run() == before and Path("run/.tmp_global_step_4").is_dir()


def test_the_checkpoints_place_in_the_data(folder: Path) -> None:
    write_checkpoint()
    state = json.loads((CHECKPOINT / "state.json").read_text())
    state["sampler"]["size"] = 63
    (CHECKPOINT / "state.json").write_text(json.dumps(state))
    (CHECKPOINT / "manifest.json").write_text(json.dumps(checkpoints.make_manifest(CHECKPOINT)))
    (error,) = tried("trainer.total_training_steps=9").errors
    assert "sampler counted 63 training prompts, data.train_files now has 64" in error


def test_a_damaged_checkpoint(folder: Path) -> None:
    write_checkpoint()
    (CHECKPOINT / "state.json").write_text("{}")
    (error,) = tried().errors
    assert "no checkpoint in" in error and "state.json has 2 bytes" in error
    assert CHECKPOINT.is_dir()


def test_a_run_with_nothing_left(folder: Path) -> None:
    write_checkpoint()
    trial = tried("trainer.total_training_steps=3")
    (warning,) = trial.warnings
    assert "global_step_3 is from the last step, 3: a run would find nothing left" in warning
    assert trial.verdict() == "The configuration is fine. See the notes above."
    (warning,) = tried("trainer.total_training_steps=2").warnings
    assert "global_step_3 is beyond the last step, 2: a run would find nothing left" in warning


def test_a_run_directory_in_use(folder: Path) -> None:
    with lock_run_dir(Path("run").resolve()):
        (error,) = tried().errors
    assert f"is in use by process {os.getpid()}" in error
    assert tried().errors == []
    assert Path("run/.lock").read_text() == str(os.getpid())


@pytest.mark.parametrize(
    "key", ["actor_rollout_ref.actor.policy_loss.loss_mode", "algorithm.adv_estimator"]
)
def test_a_function_of_the_algorithm_that_cannot_be_loaded(
    folder: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    Path("own_function.py").write_text("import nowhere\ndef own(**given): ...\n")
    monkeypatch.syspath_prepend(os.getcwd())
    (error,) = tried(f"{key}=own_function:own").errors
    assert f"{key} 'own_function:own'" in error and "nowhere" in error


@pytest.mark.parametrize(
    "overrides",
    [
        [f"actor_rollout_ref.rollout.servers=[{AWAY}]", "actor_rollout_ref.rollout.name=server"],
        [f"actor_rollout_ref.ref.url={AWAY}", "actor_rollout_ref.actor.use_kl_loss=true"],
    ],
)
def test_services_that_are_away(folder: Path, overrides: list[str]) -> None:
    """They may be started later, so this is no error. But a run would not start."""
    trial = tried(*overrides)
    assert trial.errors == []
    assert len(trial.missing) == 1 and AWAY in trial.missing[0]
    assert "a run would not start now" in trial.verdict()


def test_rows_without_an_answer(folder: Path) -> None:
    """Each sample of such a row would be a failed reward."""
    rows = pq.read_table("train.parquet").to_pylist()
    rows[5]["reward_model"]["ground_truth"] = None
    pq.write_table(pa.Table.from_pylist(rows), "train.parquet")
    (error,) = tried().errors
    assert "train.parquet row 5: reward_model.ground_truth is null" in error
    Path("reward.py").write_text("def compute_score(**row): return 1.0\n")
    assert tried("custom_reward_function.path=reward.py").errors == []


def test_a_prompt_of_the_assistant(folder: Path) -> None:
    rows = pq.read_table("train.parquet").to_pylist()
    rows[5]["prompt"] = [{"role": "assistant", "content": "4"}]
    pq.write_table(pa.Table.from_pylist(rows), "train.parquet")
    (error,) = tried().errors
    assert "train.parquet row 5: column 'prompt' has only messages of the assistant" in error


@pytest.mark.parametrize(
    ("template", "header"),
    [
        ("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}", "<assistant>"),
        (
            "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
            "{% if add_generation_prompt %}<assistant>{% endif %}",
            "",
        ),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", ""),
    ],
)
def test_a_template_that_ignores_the_generation_prompt(
    folder: Path, template: str, header: str
) -> None:
    Path("model/chat_template.jinja").write_text(template)
    said = [line for line in tried("data.max_prompt_length=64").seen if "add_generation" in line]
    assert [repr(header) in line for line in said] == [True] * bool(header)
