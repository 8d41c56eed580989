"""A run is resumed with the settings and the data that it had."""

import hashlib
import json
import shutil
from contextlib import nullcontext

import pytest

from verlite.config.critical import (
    CONTENT,
    TOOLS_CONTENT,
    begin_run,
    code_contents,
    critical_settings,
    model_contents,
)
from verlite.config.load import dump
from verlite.files import RetryingWriter
from verlite.trainer.common_checks import changed_code, refuse_changes
from verlite.trainer.errors import RunRefused
from verlite.trainer.opening import rl_preflight
from verlite.trainer.preflight import FILES, walk
from verlite.trainer.run_record import changed_keys, write_config

ADAPTER = "adapter_config.json"
REWARD_KEY = "custom_reward_function.path"
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return float(solution_str == str(ground_truth))
"""


def refuse_changed_settings(config, saved):
    return refuse_changes(critical_settings(config), saved)


def test_other_contents_of_the_training_files_are_refused(material, tmp_path):
    file = tmp_path / "train.parquet"
    file.write_bytes((material.folder / "train.parquet").read_bytes())
    config = material.load(f"data.train_files={file}").config
    begin_run()
    saved = critical_settings(config)
    before = file.read_bytes()
    assert saved[CONTENT] == [hashlib.sha256(before).hexdigest()[:12]]
    refuse_changed_settings(config, saved)

    file.write_bytes(before + b"0")
    refuse_changed_settings(config, saved)  # the run goes by the files as they were at its start
    begin_run()
    with pytest.raises(RunRefused, match="contents of data.train_files"):
        refuse_changed_settings(config, saved)

    del saved[CONTENT]  # a checkpoint of an earlier version
    refuse_changed_settings(config, saved)


def test_a_model_and_data_are_known_by_their_contents_not_by_their_place(material, tmp_path):
    config = material.load().config
    model = config.actor_rollout_ref.model
    here = shutil.copytree(model.path, tmp_path / "here", dirs_exist_ok=True)
    (here / "model.safetensors").write_bytes(bytes(range(256)) * 5000)
    model.path, config.data.train_files = str(here), str(tmp_path / "here.parquet")
    shutil.copy(material.folder / "train.parquet", config.data.train_files)
    begin_run()
    saved = json.loads(json.dumps(critical_settings(config)))  # as in a checkpoint
    assert refuse_changed_settings(config, saved) == []

    there = here.rename(tmp_path / "there")
    model.path = str(there)
    config.data.train_files = shutil.move(config.data.train_files, tmp_path / "there.parquet")
    config.data.train_files = str(config.data.train_files)
    begin_run()
    lines = refuse_changed_settings(config, saved)
    assert [line.partition(":")[0] for line in lines] == [
        "actor_rollout_ref.model.path",
        "data.train_files",
    ]
    assert all("the contents are the same" in line for line in lines)

    for name in ("tokenizer.json", "config.json", "model.safetensors"):
        before = (there / name).read_bytes()
        (there / name).write_bytes(before[:-1] + b" ")
        begin_run()
        with pytest.raises(RunRefused, match=f"(?s)model.path.*contents of the model.*{name}"):
            refuse_changed_settings(config, saved)
        (there / name).write_bytes(before)
    begin_run()
    assert refuse_changed_settings(config, saved) == lines

    model.path = "owner/name"  # not a folder: nothing to compare
    with pytest.raises(RunRefused, match="model.path"):
        refuse_changed_settings(config, saved)


def test_code_of_a_model_counts_if_it_is_run(material, tmp_path):
    config = material.load().config
    model = config.actor_rollout_ref.model
    here = shutil.copytree(model.path, tmp_path / "here")
    model.path = str(here)
    for runs in (False, True):
        model.trust_remote_code = runs
        (here / "modeling_own.py").write_text("A = 1\n")
        begin_run()
        saved = critical_settings(config)
        (here / "modeling_own.py").write_text("A = 2\n")
        begin_run()
        with pytest.raises(RunRefused, match="modeling_own.py") if runs else nullcontext():
            refuse_changed_settings(config, saved)


@pytest.mark.parametrize(
    ("key", "file"), [("tokenizer_path", "tokenizer.json"), ("lora_adapter_path", ADAPTER)]
)
def test_a_tokenizer_and_an_adapter_are_known_by_their_contents(material, tmp_path, key, file):
    config = material.load().config
    here = shutil.copytree(config.actor_rollout_ref.model.path, tmp_path / "here")
    (here / ADAPTER).write_text('{"r": 8}')
    setattr(config.actor_rollout_ref.model, key, str(here))
    begin_run()
    saved = json.loads(json.dumps(critical_settings(config)))
    there = here.rename(tmp_path / "there")
    setattr(config.actor_rollout_ref.model, key, str(there))
    begin_run()
    (line,) = refuse_changed_settings(config, saved)
    assert line.startswith(f"actor_rollout_ref.model.{key}: ") and "are the same" in line
    (there / file).write_text((there / file).read_text() + " ")
    begin_run()
    with pytest.raises(RunRefused, match=f"(?s){key}.*contents of the .*{file}") as refused:
        refuse_changed_settings(config, saved)
    assert "ln -s" not in str(refused.value)


def test_a_teacher_is_known_by_its_contents(material, tmp_path):
    config = material.load().config
    section = config.distillation
    here = shutil.copytree(config.actor_rollout_ref.model.path, tmp_path / "here")
    section.teacher_models.teacher_model.model_path = str(here)
    assert not any("teacher" in key for key in critical_settings(config))
    section.enabled = True
    begin_run()
    saved = json.loads(json.dumps(critical_settings(config)))
    there = here.rename(tmp_path / "there")
    section.teacher_models.teacher_model.model_path = str(there)
    begin_run()
    (line,) = refuse_changed_settings(config, saved)
    assert "teacher_model.model_path: " in line and "are the same" in line
    (there / "config.json").write_text((there / "config.json").read_text() + " ")
    begin_run()
    with pytest.raises(RunRefused, match="contents of the teacher's files"):
        refuse_changed_settings(config, saved)


def test_a_moved_model_of_an_old_checkpoint_has_a_way_out(material, tmp_path):
    """Checkpoints of earlier versions record no contents, so paths are compared."""
    config = material.load().config
    model = config.actor_rollout_ref.model
    here = shutil.copytree(model.path, tmp_path / "here")
    model.path = str(here)
    saved = {key: value for key, value in critical_settings(config).items() if "(" not in key}
    there = here.rename(tmp_path / "there")
    model.path = str(there)
    with pytest.raises(RunRefused, match=r"model.path: .*(?s:.*)link to the new one \(ln -s"):
        refuse_changed_settings(config, saved)
    here.symlink_to(there)
    model.path = str(here)
    begin_run()
    assert refuse_changed_settings(config, saved) == []


def test_the_tools_of_an_environment_are_known_by_their_contents(material, tmp_path):
    config = material.load().config
    here = tmp_path / "here.yaml"
    here.write_text("tools: []")
    config.max_turns, config.env.name = 2, "verlite.compat.tools:VerlTools"
    config.env.kwargs = {"tool_config_path": str(here), "other": 1}
    begin_run()
    saved = json.loads(json.dumps(critical_settings(config)))
    older = {key: value for key, value in saved.items() if key != TOOLS_CONTENT}
    assert refuse_changed_settings(config, older) == []
    there = here.rename(tmp_path / "there.yaml")
    config.env.kwargs = {"tool_config_path": str(there), "other": 1}
    begin_run()
    (moved,) = refuse_changed_settings(config, saved)
    assert moved.startswith("env.kwargs: ") and moved.endswith("the contents are the same")
    with pytest.raises(RunRefused, match="does not record the contents"):
        refuse_changed_settings(config, older)
    config.env.kwargs["other"] = 2
    with pytest.raises(RunRefused, match="env.kwargs: "):
        refuse_changed_settings(config, saved)
    config.env.kwargs["other"] = 1
    there.write_text("tools: [1]")
    begin_run()
    with pytest.raises(RunRefused, match="env.kwargs with the contents of the file of tools"):
        refuse_changed_settings(config, saved)


def test_files_are_read_at_the_start_not_at_the_first_save(material, tmp_path):
    file = tmp_path / "train.parquet"
    before = (material.folder / "train.parquet").read_bytes()
    file.write_bytes(before)
    reward = tmp_path / "reward.py"
    reward.write_text(REWARD)
    overrides = (f"data.train_files={file}", f"custom_reward_function.path={reward}")
    loaded = material.load(*overrides, f"trainer.default_local_dir={tmp_path / 'run'}")
    walk(rl_preflight(loaded.config), FILES)
    file.write_bytes(before + b"0")
    reward.write_text(REWARD + "# other\n")
    settings, code = critical_settings(loaded.config), code_contents(loaded.config)
    assert settings[CONTENT] == [hashlib.sha256(before).hexdigest()[:12]]
    assert code == {REWARD_KEY: hashlib.sha256(REWARD.encode()).hexdigest()[:12]}


def test_changed_files_of_the_user_are_named(material, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    reward, env = tmp_path / "reward.py", tmp_path / "my_own_env.py"
    reward.write_text(REWARD)
    env.write_text("first")
    config = material.load(f"custom_reward_function.path={reward}").config
    config.max_turns, config.env.name = 2, "my_own_env:Game"
    begin_run()
    saved = code_contents(config)
    assert changed_code(saved, saved) == [] and list(saved) == [REWARD_KEY, "env.name"]
    env.write_text("second")
    begin_run()
    (line,) = changed_code(code_contents(config), saved)
    one, two = (hashlib.sha256(text).hexdigest()[:12] for text in (b"first", b"second"))
    assert (
        line.startswith("the file of env.name has changed") and f"{one} before, {two} now" in line
    )
    assert changed_code(code_contents(config), {}) == []  # a checkpoint of an earlier version
    assert changed_code(code_contents(config), "damaged") == []


@pytest.mark.parametrize("command", ["./agent.py", "python agent.py 3", "agent.py:play"])
def test_the_file_of_an_agent_program_counts(material, tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "agent.py").write_text("first")
    begin_run()
    config = material.load().config
    config.agent.command = command
    assert code_contents(config) == {"agent.command": hashlib.sha256(b"first").hexdigest()[:12]}


def test_other_rewards_have_no_file(material, tmp_path):
    config = material.load().config
    config.custom_reward_function.path = None
    assert code_contents(config) == {}
    config.custom_reward_function.path = "verlite.rewards.environment"
    assert code_contents(config) == {}
    config.custom_reward_function.path = f"{config.trainer.default_local_dir}/code/reward.py"
    assert code_contents(config) == {}
    config.custom_reward_function.path = str(tmp_path / "missing.py")
    assert code_contents(config) == {REWARD_KEY: ""}


def test_a_changed_secret_is_not_reported(material, tmp_path):
    variables = "ray_kwargs.ray_init.runtime_env.env_vars"
    old, new = (
        dump(
            material.load(
                f"+{variables}.HF_TOKEN={secret}",
                f"+{variables}.PROXY=http://me:{secret}@host",
                f"data.seed={seed}",
            )
        )
        for secret, seed in (("old-secret", 1), ("new-secret", 2))
    )
    write_config(tmp_path, old, 0, RetryingWriter(pytest.fail))
    assert changed_keys(tmp_path, new) == ["data.seed: 1 before, 2 now"]


@pytest.mark.parametrize(("before", "now"), [({}, {"k": 1}), ({"k": 1}, {}), ({"k": 1}, {"k": 2})])
def test_settings_of_a_data_set_must_stay(material, before, now):
    config = material.load().config
    config.data.extra = before
    saved = json.loads(json.dumps(critical_settings(config)))
    assert refuse_changed_settings(config, saved) == []
    config.data.extra = now
    with pytest.raises(RunRefused, match="data.extra: "):
        refuse_changed_settings(config, saved)


def test_weights_beside_a_tokenizer_do_not_matter(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    begin_run()
    assert set(model_contents(str(tmp_path), "tokenizer_path")) == {"tokenizer.json"}
    assert set(model_contents(str(tmp_path))) == {"tokenizer.json", "model.safetensors"}


GDPO = "algorithm.adv_estimator=gdpo actor_rollout_ref.rollout.n=4 algorithm.gdpo_reward_keys=[a,b]"


@pytest.mark.parametrize(
    ("line", "change"),
    [
        (GDPO, "algorithm.gdpo_reward_keys=[a,c]"),
        (GDPO, "algorithm.gdpo_reward_weights=[1,0.5]"),
        ("algorithm.adv_estimator=gae", "algorithm.gamma=0.9"),
        ("algorithm.adv_estimator=gae", "algorithm.lam=0.9"),
        ("algorithm.adv_estimator=grpo", "algorithm.norm_adv_by_std_in_grpo=false"),
        ("algorithm.adv_estimator=grpo", "algorithm.whiten_advantages=true"),
        ("algorithm.adv_estimator=rloo_token_kl", "reward.clip_range=[-5,5]"),
        ("algorithm.adv_estimator=mine:f", "algorithm.gamma=0.9"),
        ("algorithm.adv_estimator=mine:f", "algorithm.adv_kwargs={alpha:0.5}"),
        ("algorithm.adv_estimator=mine:f", "algorithm.whiten_advantages=true"),
        ("algorithm.adv_estimator=mine:f", "reward.clip_range=[-5,5]"),
    ],
)
def test_what_the_estimator_reads_must_not_change(material, line, change):
    saved = json.loads(json.dumps(critical_settings(material.load(*line.split()).config)))
    changed = material.load(*line.split(), change).config
    with pytest.raises(RunRefused) as refused:
        refuse_changed_settings(changed, saved)
    lines = [text.strip() for text in str(refused.value).splitlines() if text.startswith("  ")]
    assert [text.partition(":")[0] for text in lines] == [change.partition("=")[0]]


def test_what_the_estimator_does_not_read_may_change(material):
    line = ["algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=4"]
    saved = critical_settings(material.load(*line).config)
    unread = ("algorithm.lam=0.9", "algorithm.gamma=0.9", "reward.clip_range=[-5,5]")
    changed = material.load(*line, *unread, "algorithm.adv_kwargs={alpha:0.5}").config
    assert refuse_changed_settings(changed, saved) == []


def test_whitening_may_change_where_the_estimator_whitens(material):
    line = "algorithm.adv_estimator=reinforce_plus_plus"
    saved = critical_settings(material.load(line).config)
    changed = material.load(line, "algorithm.whiten_advantages=true").config
    assert refuse_changed_settings(changed, saved) == []
