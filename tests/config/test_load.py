"""From a command line and YAML files to the typed configuration: names, types, origins."""

import pytest
import yaml
from omegaconf import OmegaConf

from tests.config.conftest import texts
from verlite.config import ConfigError, compose, dump, main_argv
from verlite.config.load import parse_argv

ACTOR, ROLLOUT = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
ENV_VARS = "ray_kwargs.ray_init.runtime_env.env_vars"


def problems(material, *overrides, **options) -> list:
    with pytest.raises(ConfigError) as error:
        material.load(*overrides, **options)
    return error.value.problems


# --- names and types ---


@pytest.mark.parametrize("prefix", ["", "+", "++"])
def test_plus_before_a_known_key_is_optional(material, prefix):
    loaded = material.load(f"{prefix}trainer.total_epochs=7")
    assert loaded.config.trainer.total_epochs == 7
    assert texts(loaded) == []


def test_tilde_restores_the_default(material):
    loaded = material.load(
        "trainer.total_epochs=7",
        "~trainer.total_epochs",
        f"{ROLLOUT}engine_kwargs={{hf:{{a:1,b:2}}}}",
        f"~{ROLLOUT}engine_kwargs.hf.a",
    )
    assert loaded.config.trainer.total_epochs is None
    assert loaded.provenance["trainer.total_epochs"] == "default"
    assert loaded.config.actor_rollout_ref.rollout.engine_kwargs == {"hf": {"b": 2}}
    kl = material.load(f"~{ACTOR}use_kl_loss", config_name="grpo").config.actor_rollout_ref.actor
    assert kl.use_kl_loss is False
    assert material.load("max_turns=3", "~max_turns").config.max_turns == 0
    assert material.notes("data.shuffle=false", "data.seed=1", "~data.shuffle") == []


def test_tilde_of_an_unknown_key_or_entry(material):
    found = problems(material, "~data.shufle", f"~{ROLLOUT}engine_kwargs.hf.a")
    assert [(p.key, p.rule) for p in found] == [
        ("data.shufle", "unknown key"),
        (f"{ROLLOUT}engine_kwargs.hf.a", "this entry does not exist"),
    ]
    assert "data.shuffle" in found[0].remedy


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("data.trian_batch_size=1", "data.train_batch_size"),
        ("actor.ppo_mini_batch_size=1", "actor_rollout_ref.actor.ppo_mini_batch_size"),
        ("rollout.n=1", "actor_rollout_ref.rollout.n"),
        ("actor_rollout_ref.actor.lr=1", "actor_rollout_ref.actor.optim.lr"),
        ("trainer.kl_coef=1", "algorithm.kl_ctrl.kl_coef"),
        (
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_device=1",
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
        ),
        ("trainer.n_gpu_per_node=1", "trainer.n_gpus_per_node"),
        ("adv_estimator=gae", "algorithm.adv_estimator"),
    ],
)
def test_unknown_key_suggests_similar_keys(material, typed, meant):
    (problem,) = problems(material, typed)
    assert (problem.key, problem.value, problem.rule) == (*typed.split("="), "unknown key")
    assert problem.remedy.startswith(f"Did you mean {meant}")


@pytest.mark.parametrize(
    "typed",
    [
        "algorithm.adaptive_entropy.enabled=true",
        "algorithm.grpo.path=x",
        "actor_rollout_ref.actor.gvpo_beta=1",
        "actor_rollout_ref.rollout.n_think=2",
    ],
)
def test_unknown_key_that_is_near_to_none(material, typed):
    (problem,) = problems(material, typed)
    assert problem.remedy == "List keys: verlite explain."


@pytest.mark.parametrize(
    ("typed", "rule"),
    [
        ("data.train_batch_size=1.5", "expected whole number, got a number"),
        ("data.train_batch_size=[1]", "expected whole number, got a list"),
        ("data.train_batch_size={a:1}", "expected whole number, got a mapping"),
        (ACTOR + "optim.lr=fast", "expected number, got text"),
        (ACTOR + "optim.betas=[0.9,b]", "expected list of numbers, got a list with b"),
        (ACTOR + "ppo_micro_batch_size_per_gpu=None", "expected whole number or null, got text"),
        (ACTOR + "optim=3", "is a section of keys and takes no value"),
        ("cluster.component_placement=0-3", "expected mapping or null, got text"),
        (ROLLOUT + "engine_kwargs=fast", "expected mapping, got text"),
        ("trainer.experiment_name=[a,b]", "expected text, got a list"),
        ("retriever.url={a:1}", "expected an address or a list of addresses, got a mapping"),
    ],
)
def test_wrong_type_names_the_expected_type(material, typed, rule):
    (problem,) = problems(material, typed)
    assert (problem.key, problem.rule) == (typed.split("=")[0], rule)


@pytest.mark.parametrize(
    ("typed", "key", "rule"),
    [
        ("data.seed=1,2", "data.seed", "a comma outside brackets starts a sweep of several runs"),
        ("trainer.logger=[console", "trainer.logger", "cannot be parsed: "),
        (
            "trainer.experiment_name=${trainer.nothing}",
            "trainer.experiment_name",
            "Interpolation key 'trainer.nothing' not found",
        ),
        (
            "trainer.experiment_name=${oc.env:NO_SUCH_VARIABLE}",
            "trainer.experiment_name",
            "KeyError raised while resolving interpolation",
        ),
    ],
)
def test_unparsable_override_is_reported(material, typed, key, rule):
    (problem,) = problems(material, typed)
    assert problem.key == key
    assert problem.rule.startswith(rule)


def test_text_is_taken_literally(material):
    """Hydra's grammar cannot parse these values. A shell user means them literally."""
    loaded = material.load(
        "trainer.experiment_name=lr=1e-6,n=5",
        "trainer.project_name=~x(y)",
        "trainer.resume_from_path=~/a",
        "actor_rollout_ref.model.custom_chat_template={% for m in messages %}{{ m }}{% endfor %}",
    )
    template = loaded.config.actor_rollout_ref.model.custom_chat_template
    assert template == "{% for m in messages %}{{ m }}{% endfor %}"
    assert loaded.config.trainer.experiment_name == "lr=1e-6,n=5"
    assert loaded.config.trainer.project_name == "~x(y)"
    assert not loaded.config.trainer.resume_from_path.startswith("~")


@pytest.mark.parametrize("name", ["2024_11", "1e-6", "1.50", "true", "007", "1_000.5", "inf"])
def test_name_that_looks_like_a_number_is_kept(material, name):
    """Hydra parses these as numbers and booleans. Converted back they would be other names."""
    loaded = material.load(
        f"trainer.experiment_name={name}",
        f"data.tokenizer={name}",
        "~trainer.default_local_dir",
        "custom_reward_function.reward_kwargs.method=strict",
    )
    assert loaded.config.trainer.experiment_name == name
    assert loaded.config.trainer.default_local_dir == f"checkpoints/verlite_examples/{name}"
    assert loaded.config.actor_rollout_ref.model.tokenizer_path == name
    (problem,) = problems(material, f"data.train_files={name}")
    assert problem.value == name
    assert (
        material.load(
            "actor_rollout_ref.model.tokenizer_path=null"
        ).config.actor_rollout_ref.model.tokenizer_path
        is None
    )


def test_values_of_every_type(material):
    loaded = material.load(
        "trainer.logger=console",
        f"{ACTOR}optim={{lr:2e-5,betas:[0.8,0.9]}}",
        f"{ROLLOUT}engine_kwargs.hf.x.y=3",
        "trainer.experiment_name='a b'",
        "cluster.component_placement.actor=0-3,6",
        "cluster.component_placement.rollout=7",
        "cluster.component_placement.critic=[4,5]",
    )
    config = loaded.config
    assert config.trainer.logger == ["console"]
    assert (
        config.actor_rollout_ref.actor.optim.lr,
        config.actor_rollout_ref.actor.optim.betas,
    ) == (2e-5, [0.8, 0.9])
    assert config.actor_rollout_ref.rollout.engine_kwargs == {"hf": {"x": {"y": 3}}}
    assert config.trainer.experiment_name == "a b"
    assert config.cluster.component_placement == {
        "actor": "0-3,6",
        "rollout": "7",
        "critic": [4, 5],
    }
    assert config.trainer.default_local_dir == f"{material.folder}/run"


def test_mapping_with_quoted_keys(material):
    loaded = material.load('+cluster.component_placement={"actor,critic": "0-3", rollout: "4-7"}')
    assert loaded.config.cluster.component_placement == {"actor,critic": "0-3", "rollout": "4-7"}
    (problem,) = problems(material, 'cluster.component_placement={"actor": 0-3')
    assert problem.rule.startswith("cannot be parsed")


def test_all_problems_are_reported_together(material):
    found = problems(
        material,
        "data.shufle=false",
        "data.train_batch_size=x",
        f"{ROLLOUT}top_p=2",
        "algorithm.adv_estimator=groo",
        "data.val_files=/nowhere.parquet",
        f"{ACTOR}megatron.tp=2",
        f"{ACTOR}strategy=megatron",
    )
    assert [p.key for p in found] == [
        "data.shufle",
        "data.train_batch_size",
        f"{ACTOR}megatron.tp",
        f"{ACTOR}strategy",
        "algorithm.adv_estimator",
        f"{ROLLOUT}top_p",
        "data.val_files",
    ]


def test_required_keys():
    with pytest.raises(ConfigError) as error:
        compose()
    assert [p.key for p in error.value.problems] == [
        "actor_rollout_ref.model.path",
        "data.train_files",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
    ]


@pytest.mark.parametrize(
    ("typed", "key"),
    [
        ("data.seed=???", "data.seed"),
        (f"{ROLLOUT}val_kwargs.temperature=???", f"{ROLLOUT}val_kwargs.temperature"),
        ("trainer.logger=[???]", "trainer.logger[0]"),
        ("custom_reward_function.reward_kwargs.a=???", "custom_reward_function.reward_kwargs.a"),
        ("env.kwargs={a:{b:[1,???]}}", "env.kwargs.a.b[1]"),
        ("env.kwargs=???", "env.kwargs"),
        (f"{ENV_VARS}.NAME=???", f"{ENV_VARS}.NAME"),
    ],
)
def test_a_key_with_three_question_marks_must_be_given(material, typed, key):
    """Hydra's sign of a value that is left open, of a key with a default and inside it, too."""
    (problem,) = problems(material, typed)
    assert (problem.key, problem.rule) == (key, "must be given")


KWARGS, ENGINE = "custom_reward_function.reward_kwargs", f"{ROLLOUT}engine_kwargs.vllm"
MODEL_CONFIG = "actor_rollout_ref.model.override_config"


@pytest.mark.parametrize(
    ("typed", "in_yaml", "key", "value"),
    [
        ("env.kwargs.x.y=1 ~env.kwargs.x", {}, "env.kwargs", {}),
        ("env.kwargs.x.y.z=1 env.kwargs.x=2", {}, "env.kwargs", {"x": 2}),
        ("env.kwargs={gpt-4.1:{a.b:1}}", {}, "env.kwargs", {"gpt-4.1": {"a.b": 1}}),
        ("env.kwargs={b.c:2,1:{0.5:3}}", {}, "env.kwargs", {"b.c": 2, "1": {"0.5": 3}}),
        (
            "env.kwargs={tool:{gpt-4.1:2}} env.kwargs.tool.c=3",
            {"env": {"kwargs": {"tool": {"a": 1, "gpt-4.1": 0}}}},
            "env.kwargs",
            {"tool": {"a": 1, "gpt-4.1": 2, "c": 3}},
        ),
        (f"{ENGINE}.a=1 {ENGINE}=null", {}, f"{ROLLOUT}engine_kwargs", {"vllm": None}),
        (f"{KWARGS}.a.b=1 {KWARGS}.a=3", {}, KWARGS, {"a": 3}),
        (f"{MODEL_CONFIG}.a.b=1 {MODEL_CONFIG}.a=1", {}, MODEL_CONFIG, {"a": 1}),
        (
            "cluster.component_placement=null",
            {"cluster": {"component_placement": {"actor": 0}}},
            "cluster.component_placement",
            None,
        ),
        ("env.kwargs.tool=2", {"env": {"kwargs": {"tool": {"a": 1}}}}, "env.kwargs", {"tool": 2}),
        ("~env.kwargs.tool", {"env": {"kwargs": {"tool": {"a": 1}}}}, "env.kwargs", {}),
    ],
)
def test_a_mapping_may_be_replaced_after_its_entries_were_set(
    material, tmp_path, typed, in_yaml, key, value
):
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(in_yaml))
    options = {"config_name": "mine", "config_dir": tmp_path, "check": False}
    loaded = material.load(*typed.split(), **options)
    assert OmegaConf.select(loaded.tree, key) == value


def test_an_unknown_interpolation_in_a_mapping_is_reported(material):
    (problem,) = problems(material, "cluster.component_placement={actor:'${nope}'}")
    assert problem.key == "cluster.component_placement"
    assert problem.rule == "Interpolation key 'nope' not found"


def test_mistyped_required_key_is_reported_once(material):
    (problem,) = [
        p
        for p in problems(material, "~data.train_files", "data.train_file=x")
        if "train_file" in p.key
    ]
    assert problem.key == "data.train_file"


# --- YAML files ---


def test_verlite_yaml_files(material):
    assert material.load().config.algorithm.adv_estimator == "gae"
    grpo = material.load(config_name="grpo").config
    assert (
        grpo.algorithm.adv_estimator,
        grpo.actor_rollout_ref.rollout.n,
        grpo.actor_rollout_ref.actor.use_kl_loss,
    ) == ("grpo", 5, True)


def test_user_yaml_extends_verlite_yaml(material, tmp_path):
    (tmp_path / "mine.yaml").write_text(
        "defaults:\n  - grpo\n  - _self_\n"
        "actor_rollout_ref:\n  rollout:\n    n_agent: 3\n    engine_kwargs:\n      hf: {a: 1}\n"
        'cluster:\n  component_placement:\n    "actor, rollout": 0-3,5-7\n    ref: 4\n'
        "data:\n  seed: 5\n"
    )
    loaded = material.load("data.seed=6", config_name="mine", config_dir=tmp_path)
    config = loaded.config
    assert (
        config.algorithm.adv_estimator,
        config.actor_rollout_ref.rollout.n,
        config.data.seed,
    ) == ("grpo", 3, 6)
    assert config.cluster.component_placement == {"actor, rollout": "0-3,5-7", "ref": 4}
    names = (
        "algorithm.adv_estimator",
        f"{ROLLOUT}n",
        "data.seed",
        "data.shuffle",
        f"{ROLLOUT}engine_kwargs",
        "trainer.n_gpus_per_node",
    )
    origins = {key: loaded.provenance[key] for key in names}
    assert origins == {
        "algorithm.adv_estimator": "grpo.yaml",
        f"{ROLLOUT}n": "mine.yaml",
        "data.seed": "command line",
        "data.shuffle": "default",
        f"{ROLLOUT}engine_kwargs": "mine.yaml",
        "trainer.n_gpus_per_node": "command line",
    }
    assert {f"{ROLLOUT}n", "data.seed"} <= loaded.user_keys
    assert "algorithm.adv_estimator" not in loaded.user_keys  # set by verlite's own file
    assert f"{ROLLOUT}n_agent is now called {ROLLOUT}n" in texts(loaded)


def test_verlite_yaml_values_cause_no_notes(material):
    notes = material.notes(f"{ACTOR}use_kl_loss=false", config_name="grpo")
    assert notes == []  # the user did not set kl_loss_coef


def test_config_groups_of_the_user_folder(material, tmp_path):
    (tmp_path / "size").mkdir()
    (tmp_path / "size" / "small.yaml").write_text(
        "# @package _global_\ndata:\n  train_batch_size: 256\n"
    )
    (tmp_path / "size" / "large.yaml").write_text(
        "# @package _global_\ndata:\n  train_batch_size: 512\n"
    )
    (tmp_path / "mine.yaml").write_text("defaults:\n  - ppo_trainer\n  - size: small\n  - _self_\n")
    assert (
        material.load(config_name="mine", config_dir=tmp_path).config.data.train_batch_size == 256
    )
    chosen = material.load("size=large", config_name="mine", config_dir=tmp_path)
    assert (chosen.config.data.train_batch_size, chosen.provenance["data.train_batch_size"]) == (
        512,
        "size/large.yaml",
    )


def test_config_path_of_a_folder_without_the_file_is_an_error(material, tmp_path):
    """verlite's own file is not taken in its place."""
    for folder in (tmp_path, tmp_path / "none"):
        for name in (None, "ppo_trainer"):
            (problem,) = problems(material, config_name=name, config_dir=folder)
            assert (problem.key, problem.value) == ("--config-path", str(folder))
    (tmp_path / "ppo_trainer.yaml").write_text("algorithm:\n  adv_estimator: remax\n")
    assert material.load(config_dir=tmp_path).config.algorithm.adv_estimator == "remax"


@pytest.mark.parametrize(
    ("content", "key", "words"),
    [
        ("data:\n  sede: 1\n", "data.sede (mine.yaml)", "unknown key"),
        ("data:\n  seed: x\n", "data.seed (mine.yaml)", "expected whole number"),
        ("megatron:\n  a: 1\n  b: {c: 2}\n", "megatron (mine.yaml)", "unknown key"),
        ("data: [\n", "mine.yaml", "is not valid YAML"),
        ("- 1\n", "mine.yaml", ""),
        ("defaults:\n  - nothing_here\n", "--config-name", "nothing_here"),
    ],
)
def test_user_yaml_with_an_error(material, tmp_path, content, key, words):
    (tmp_path / "mine.yaml").write_text(content)
    (problem,) = problems(material, config_name="mine", config_dir=tmp_path)
    assert problem.key.endswith(key) or key == "mine.yaml" and "mine" in str(problem)
    assert words in str(problem)


def test_unknown_config_name_and_path(material, tmp_path):
    (problem,) = problems(material, config_name="grop")
    assert (problem.key, problem.value) == ("--config-name", "grop")
    assert "grpo" in problem.remedy and "sft" not in problem.remedy
    (problem,) = problems(material, config_name="grpo", config_dir=tmp_path / "none")
    assert problem.key == "--config-path" and problem.rule == "does not exist"
    (tmp_path / "file.yaml").touch()
    (problem,) = problems(material, config_name="grpo", config_dir=tmp_path / "file.yaml")
    assert problem.rule == "is a file, not a folder"


# --- origins and config.yaml ---


def test_dump_has_origins_and_can_be_loaded(material, tmp_path):
    loaded = material.load("data.seed=7", f"{ROLLOUT}engine_kwargs.hf.a=1", config_name="grpo")
    text = dump(loaded)
    lines = [line.strip() for line in text.splitlines()]
    assert "seed: 7  # command line" in lines
    assert "adv_estimator: grpo  # grpo.yaml" in lines
    assert "shuffle: true" in lines
    assert "a: 1  # command line" in lines
    assert f"default_local_dir: {material.folder}/run  # command line" in lines
    (tmp_path / "config.yaml").write_text(text)
    again = compose("config", config_dir=tmp_path)
    assert again.config == loaded.config
    assert yaml.safe_load(text)["trainer"]["logger"] == ["console"]


def test_interpolations_are_resolved(material):
    loaded = material.load(
        "~trainer.default_local_dir", "trainer.project_name=p", "trainer.experiment_name=e"
    )
    assert loaded.config.trainer.default_local_dir == "checkpoints/p/e"
    assert "default_local_dir: checkpoints/p/e" in dump(loaded)


def test_secrets_are_never_printed(material, tmp_path):
    reward = tmp_path / "reward.py"
    reward.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info, **kwargs):\n"
        "    return 0\n"
    )
    kwargs = "custom_reward_function.reward_kwargs"
    given = [
        f"custom_reward_function.path={reward}",
        f"{kwargs}.api_key=hunter2",
        f"{kwargs}.judge={{auth_token:hunter2,max_tokens:16}}",
        "retriever.url=http://me:hunter2@localhost:8000/retrieve",
        "max_turns=1",
    ]
    loaded = material.load(*given)
    assert loaded.config.custom_reward_function.reward_kwargs["api_key"] == "hunter2"
    text = dump(loaded)
    assert "hunter2" not in text + "".join(texts(loaded))
    dumped = yaml.safe_load(text)
    assert dumped["custom_reward_function"]["reward_kwargs"] == {
        "api_key": "***",
        "judge": {"auth_token": "***", "max_tokens": 16},
    }
    assert dumped["data"]["prompt_key"] == "prompt"
    assert dumped["retriever"]["url"] == "http://me:***@localhost:8000/retrieve"
    with pytest.raises(ConfigError) as error:
        material.load(
            *given,
            "trainer.wandb_api_key=hunter2",
            "+wandb.password=a(hunter2)",
            f"{kwargs}.secret=[hunter2",
            f"{kwargs}.api_key=hunter2,x",
            f"{kwargs}.api_key=other",
            "retriever.url=ftp://me:hunter2@x",
            "wandb={api_key:hunter2}",
        )
    from rich.console import Console

    console = Console(width=200, record=True, quiet=True)
    console.print(error.value.text())
    assert len(error.value.problems) == 6
    assert "hunter2" not in str(error.value) + console.export_text() + "".join(error.value.notes)


# --- argv ---


@pytest.mark.parametrize(
    "argv",
    [
        ["a=1", "--config-name", "grpo", "b=2", "--config-path", "mine"],
        ["--config-name=grpo", "--config-path=mine", "a=1", "b=2"],
        ["-cn", "grpo", "a=1", "b=2", "-cd", "mine"],
    ],
)
def test_options_at_any_position(argv):
    assert parse_argv(argv) == ("grpo", "mine", ["a=1", "b=2"], False)


@pytest.mark.parametrize(
    ("argv", "key", "rule"),
    [
        (["--config-name", "grpo", "-cn=ppo"], "-cn", "--config-name is given twice"),
        (["--config-path=a", "--config-dir", "b"], "--config-dir", "--config-path is given twice"),
        (["a=1", "--config-name"], "--config-name", "needs a value"),
    ],
)
def test_option_given_twice_or_without_value(argv, key, rule, capsys):
    with pytest.raises(ConfigError) as error:
        parse_argv(argv)
    (problem,) = error.value.problems
    assert (problem.key, problem.rule) == (key, rule)
    with pytest.raises(SystemExit) as stop:
        main_argv(argv)
    assert stop.value.code == 2 and rule in capsys.readouterr().err


@pytest.mark.parametrize(
    "typed", [["data.seed", "=", "7"], ["data.seed=", "7"], ["data.seed", "=7"], ["data.seed = 7"]]
)
def test_spaces_around_the_equal_sign(material, typed):
    (problem,) = problems(material, *typed, "data.shuffle=false")
    assert (problem.key, problem.rule, problem.remedy) == (
        "data.seed = 7",
        "there are spaces around the = sign",
        "Write data.seed=7",
    )


def test_literal_quotes_and_unexpanded_variables(material, monkeypatch):
    (problem,) = problems(material, "'data.seed=7'")
    assert problem.rule == "the quotes are part of the argument"
    found = problems(material, "data.train_files=$DATA/train.parquet")
    assert [p.rule for p in found] == ["contains $DATA, which was not expanded"]
    assert "${oc.env:DATA}" in found[0].remedy and "double quotes" in found[0].remedy
    found = problems(material, "trainer.experiment_name=${NAME}")
    assert "${oc.env:NAME}" in found[0].remedy
    monkeypatch.setenv("DATA", str(material.folder))
    loaded = material.load("data.val_files=${oc.env:DATA}/test.parquet")
    assert loaded.config.data.val_files == f"{material.folder}/test.parquet"


@pytest.mark.parametrize("key", ["num_generations", "beta"])
def test_a_setting_of_trl_leads_to_its_page(material, key):
    with pytest.raises(ConfigError) as raised:
        material.load(f"{key}=8")
    (problem,) = raised.value.problems
    assert (problem.key, problem.rule) == (key, "unknown key")
    assert "docs/migration/trl.md" in problem.remedy
    with pytest.raises(ConfigError, match="unknown key") as raised:
        material.load("generations=8")
    assert "trl" not in str(raised.value)


def test_main_argv(material, capsys):
    assert (
        main_argv(["--config-name", "grpo", *material.good]).config.algorithm.adv_estimator
        == "grpo"
    )
    with pytest.raises(SystemExit) as stop:
        main_argv(["--help"])
    assert stop.value.code == 0
    printed = capsys.readouterr().out
    names = "agent_demo, dapo, dr_grpo, gdpo, grpo, gspo, openenv_demo, ppo, ppo_trainer, "
    names += "quickstart, quickstart_async, reinforce_plus_plus, remax, rloo, search_demo, "
    names += "search_r1, verifiers_demo"
    assert f"NAME is one of {names}, or a YAML file" in printed
    with pytest.raises(SystemExit) as stop:
        main_argv([*material.good, "data.sede=1"])
    assert stop.value.code == 2
    assert "Did you mean data.seed" in capsys.readouterr().err
