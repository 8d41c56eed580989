"""verlite as a library: configurations, checks, results, and the user's own functions in files."""

import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import verlite
from tests.models import tiny_model
from tests.trainer.runs import write_sums
from verlite.api import ENV_VARS, Result, name_of, with_own_code, write_callable
from verlite.config.compile import env_spec
from verlite.controller.failures import RayLost
from verlite.envs.factory import EnvFactory, build_env_factory
from verlite.trainer.errors import RunRefused
from verlite.trainer.opening import lock_run_dir
from verlite.trainer.stop import Stop

ACTOR, ROLLOUT = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("library")
    write_sums(folder / "train.parquet", 64)
    tiny_model(folder / "model")
    return folder


@pytest.fixture
def config(folder, tmp_path):
    return verlite.load_config(
        "grpo",
        {
            "data.train_files": folder / "train.parquet",
            "data.train_batch_size": 8,
            "data.max_prompt_length": 8,
            "data.max_response_length": 8,
            "actor_rollout_ref": {
                "model": {"path": folder / "model"},
                "actor": {"ppo_mini_batch_size": 8, "ppo_micro_batch_size_per_gpu": 4},
                "rollout": {"name": "hf", "n": 4},
            },
            "trainer.device": "cpu",
            "trainer.n_gpus_per_node": 1,
            "trainer.logger": ("console",),
            "trainer.default_local_dir": tmp_path / "run",
        },
    )


def test_import_is_light():
    code = (
        "import sys, verlite; before = set(sys.modules); verlite.load_config; "
        "heavy = {'torch', 'ray', 'transformers', 'vllm'}; "
        "print(sorted(heavy & set(sys.modules)), 'omegaconf' in before)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "[] False", done.stderr


def test_unknown_name_of_the_package():
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = verlite.trian


def test_numbers_of_numpy_and_torch_are_numbers(config):
    changed = config.override(
        {
            "data.train_batch_size": np.arange(10)[8],
            f"{ACTOR}optim": {"lr": np.float32(0.5), "betas": np.array([0.5, 0.75])},
            f"{ROLLOUT}n": torch.tensor(2),
        }
    )
    found = [changed[key] for key in ("data.train_batch_size", f"{ACTOR}optim.lr", f"{ROLLOUT}n")]
    assert [(type(value), value) for value in found] == [(int, 8), (float, 0.5), (int, 2)]
    assert list(changed[f"{ACTOR}optim.betas"]) == [0.5, 0.75]


def test_values_come_from_a_mapping_a_list_and_a_file(config, folder, tmp_path):
    assert config["data.train_files"] == str(folder / "train.parquet")
    assert config[f"{ROLLOUT}n"] == 4
    assert config.values.trainer.logger == ["console"]
    changed = config.override([f"{ROLLOUT}n=2"]).override({"trainer.device": "auto"})
    assert (changed[f"{ROLLOUT}n"], changed["trainer.device"]) == (2, "auto")
    assert config[f"{ROLLOUT}n"] == 4
    assert "n: 4  # Python" in config.yaml()
    file = tmp_path / "mine.yaml"
    file.write_text(f"defaults: [grpo]\ndata: {{train_files: {folder}/train.parquet}}\n")
    own = verlite.load_config(file, ["actor_rollout_ref.model.path=here"])
    assert own["algorithm.adv_estimator"] == "grpo"
    with pytest.raises(KeyError):
        config["trainer.devise"]


@pytest.mark.parametrize(
    "overrides, words",
    [
        ({"data.train_bach_size": 8}, "Did you mean data.train_batch_size"),
        ({"data.train_batch_size": "many"}, "expected whole number, got text"),
        (["data.train_batch_size"], "Write overrides as key=value"),
        ({}, "data.train_files: must be given"),
    ],
)
def test_a_wrong_configuration_raises_config_error(overrides, words):
    with pytest.raises(verlite.ConfigError) as caught:
        verlite.load_config("grpo", overrides)
    assert words in str(caught.value)
    assert all(problem.rule for problem in caught.value.problems)


def test_a_missing_file_is_a_config_error(tmp_path):
    with pytest.raises(verlite.ConfigError, match="is not a YAML file that exists"):
        verlite.load_config(tmp_path / "none.yaml")
    with pytest.raises(verlite.ConfigError, match="Available: .*grpo"):
        verlite.load_config("grop")


def test_check_reports_the_plan_and_every_problem(config):
    found = verlite.check(config.override({"algorithm.kl_ctrl.kl_coef": 0.1}))
    assert found.plan.devices_per_node == 1
    assert "algorithm.kl_ctrl.kl_coef has no effect" in str(found)
    assert "8 prompts x 4 = 32 samples" in str(found)
    with pytest.raises(verlite.ConfigError) as caught:
        verlite.check(config.override({f"{ROLLOUT}top_p": 2.0, "trainer.nnodes": 0}))
    keys = {problem.key for problem in caught.value.problems}
    assert keys == {f"{ROLLOUT}top_p", "trainer.nnodes"}
    assert not gc.get_freeze_count(), "the caller's own objects are collected as before"


def test_check_with_functions_leaves_nothing_behind(config, tmp_path):
    path = list(sys.path)
    found = verlite.check(config, reward=lambda solution_str, **row: 1.0)
    assert found.notes is not None
    assert sys.path == path
    assert not (tmp_path / "run").exists()


# --- the user's functions ---

BONUS = 10


def module_level(data_source, solution_str, ground_truth, extra_info=None):
    return BONUS + len(solution_str)


class Scale:
    def score(self, solution_str, **row):
        return BONUS * len(solution_str)

    def __call__(self, solution_str, **row):
        return self.score(solution_str)


def call_elsewhere(folder: Path, names: list[str]) -> list[str]:
    """Load functions of a folder in a new process as a reward process does, and call them."""
    code = (
        "import sys; from verlite.rewards.process import load\n"
        "for number, name in enumerate(sys.argv[1:]):\n"
        "    score = load(f'{number}/reward.py:{name}', ['solution_str', 'ground_truth', "
        "'data_source', 'extra_info'])\n"
        "    print(score(solution_str='abc', ground_truth='', data_source='', extra_info=None))"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(verlite.__file__).parents[1])}
    command = [sys.executable, "-c", code, *names]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env=environment, cwd=folder
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def closure(bonus):
    def score(solution_str, **row):
        return bonus + len(solution_str)

    return score


@pytest.mark.process
def test_functions_work_in_another_process(tmp_path):
    cases = [
        (module_level, "module_level", "13"),
        (closure(100), "score", "103"),
        (lambda solution_str, **row: 5 * len(solution_str), "function", "15"),
        (Scale(), "Scale", "30"),
        (Scale().score, "score", "30"),
    ]
    for number, (function, name, _) in enumerate(cases):
        (tmp_path / str(number)).mkdir()
        write_callable(function, tmp_path / str(number) / "reward.py")
        assert name_of(function) == name
    found = call_elsewhere(tmp_path, [name for _, name, _ in cases])
    assert found == [expected for _, _, expected in cases]


def test_importable_function_is_written_as_an_import(tmp_path):
    write_callable(module_level, tmp_path / "reward.py")
    text = (tmp_path / "reward.py").read_text()
    assert f"from {__name__} import module_level\n" in text
    assert "pickle" not in text


@pytest.mark.parametrize("call", [verlite.check, verlite.train, verlite.evaluate])
def test_a_mapping_in_place_of_a_configuration_is_explained(call):
    with pytest.raises(TypeError, match=r"config is of the type dict, .*Write verlite.load_config"):
        call({"data.train_batch_size": 64})


@pytest.mark.parametrize(
    ("argument", "way_out"),
    [
        ({"reward": "my_reward.py"}, '"custom_reward_function.path": "my_reward.py"'),
        ({"env": "my_env:Factory"}, '"env.name": "my_env:Factory"'),
    ],
)
def test_text_in_place_of_a_function_is_explained(config, argument, way_out):
    with pytest.raises(TypeError, match=f"is text, not a function. Pass .*{way_out}"):
        verlite.check(config, **argument)


def test_what_cannot_be_stored_is_refused(tmp_path):
    lock = threading.Lock()
    with pytest.raises(TypeError, match="cannot be stored for other processes.*lock"):
        write_callable(lambda **row: lock.locked(), tmp_path / "reward.py")
    with pytest.raises(TypeError, match="expected a function or a class, got 3"):
        write_callable(3, tmp_path / "reward.py")
    assert not (tmp_path / "reward.py").exists()


def test_environment_gets_a_module_that_workers_find(config, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/before")
    with with_own_code(config, None, Scale, tmp_path) as whole:
        assert whole["env.name"] == "verlite_own_env:Scale"
        assert whole[ENV_VARS]["PYTHONPATH"] == f"{tmp_path}:/before"
        import verlite_own_env

        assert verlite_own_env.Scale is Scale
    assert "verlite_own_env" not in sys.modules
    assert str(tmp_path) not in sys.path


def test_an_environment_of_a_notebook_gets_its_settings(config, tmp_path):
    """A class inside a function is stored by value, as one of a notebook is."""

    class Game(EnvFactory):
        def __init__(self, bonus=0.0):
            super().__init__()
            self.bonus = bonus

        def env(self, extra_info):
            return (self.bonus, extra_info)

    settings = {"max_turns": 2, "env.kwargs": {"bonus": 0.5}}
    for env in (Game, lambda bonus: Game(bonus)):
        with with_own_code(config.override(settings), None, env, tmp_path) as whole:
            factory = build_env_factory(env_spec(whole.loaded(check=False).config))
        assert isinstance(factory, EnvFactory)
        assert factory.env({"secret": 7}) == (0.5, {"secret": 7})


def test_a_directory_in_use_is_refused_before_its_code_changes(config, tmp_path):
    with lock_run_dir(tmp_path / "run"), pytest.raises(RunRefused, match="in use by process"):
        verlite.train(config, reward=module_level)
    assert not (tmp_path / "run" / "code").exists()


# --- results ---


def test_result_reads_the_run_directory(tmp_path):
    lines = [{"step": step, "score": step / 10} for step in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = Result(tmp_path, "finished", 0)
    assert result.step == 2
    assert result.history("score") == [(1, 0.1), (2, 0.2)]
    assert result.checkpoint is None and result.model is None
    with pytest.raises(KeyError, match="Similar: score"):
        result.history("scor")


# --- a run inside another program ---


def test_embedded_run_never_ends_the_process(tmp_path, capsys):
    stop = Stop(embedded=True)
    before = signal.getsignal(signal.SIGINT), signal.set_wakeup_fd(-1)
    with stop:
        stop.begin(tmp_path)
        assert signal.set_wakeup_fd(-1) == -1
        assert stop.report(RunRefused("no")) == 2
        assert capsys.readouterr().err == ""
        assert json.loads((tmp_path / "error.json").read_text())["message"] == "no"
    assert (signal.getsignal(signal.SIGINT), signal.set_wakeup_fd(before[1])) == before


def test_every_interrupt_of_an_embedded_run_raises():
    with Stop(embedded=True) as stop:
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        assert stop.machine.requested == "SIGINT"


def test_lost_ray_is_raised_in_the_main_thread_of_an_embedded_run(tmp_path):
    with Stop(embedded=True) as stop:
        stop.begin(tmp_path)
        error = RayLost("the raylet has ended")
        thread = threading.Thread(target=stop.end_at_once, args=(error,))
        with pytest.raises(RayLost):
            thread.start()
            thread.join()
            time.sleep(5)
        assert stop.machine.code == 76
