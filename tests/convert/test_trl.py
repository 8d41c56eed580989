"""TRL's scripts and YAML files: every field, batches in prompts, losses, and scripts as text."""

import dataclasses
import warnings

import pytest
import yaml

from tests.convert.conftest import BOMB, SAMPLES, check_changes
from verlite.config.commands import PPO
from verlite.config.problems import ConfigError
from verlite.convert import rows, text, trl
from verlite.convert.formulas import COMMANDS, own_key
from verlite.convert.trl import TABLES

ACTOR, ROLLOUT = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
SCRIPT = (SAMPLES / "convert/trl_grpo.py").read_text()
FIELDS = yaml.safe_load((SAMPLES / "convert/trl_fields.yaml").read_text())


@pytest.fixture
def script(tmp_path):
    def converted(text: str, gpus: int = 8):
        (tmp_path / "train.py").write_text(text)
        return trl.convert(tmp_path / "train.py", gpus)

    return converted


@pytest.fixture
def grpo(tmp_path):
    """Convert GRPO settings on top of the smallest ones, for one process."""

    def converted(trainer: str | None = None, **settings):
        least = {"model_name_or_path": "m", "dataset_name": "d.json", "max_prompt_length": 256}
        (tmp_path / "run.yaml").write_text(yaml.safe_dump({**least, **settings}))
        return trl.convert(tmp_path / "run.yaml", 1, trainer)

    return converted


def problems(convert, *arguments, **settings) -> str:
    try:
        return "\n".join(map(str, convert(*arguments, **settings).problems))
    except ConfigError as error:
        return "\n".join(map(str, error.problems))


# The tables


def training_arguments() -> list[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import TrainingArguments
    return [field.name for field in dataclasses.fields(TrainingArguments)]


@pytest.mark.parametrize("trainer", TABLES)
def test_every_field_is_known(trainer):
    names = [*FIELDS.get(trainer, []), *training_arguments()]
    assert [name for name in names if rows.find(TABLES[trainer].rows, name) is None] == []


def test_every_target_is_a_key():
    for trainer, table in TABLES.items():
        command = COMMANDS.get(trainer, PPO)
        for row in table.rows:
            for key in row.to.split():
                own = own_key(key) if trainer in COMMANDS else key
                assert not own or own in command.keys, (row.name, key)
        named = [name for row in table.rows for name in (row.name, *row.also)]
        assert len(named) == len(set(named))


# A script


def test_the_script(script, files):
    conversion = script(SCRIPT)
    files.check(conversion)
    expected = {
        # 4 samples x 8 processes x 8 steps are 256 samples, 32 prompts of 8. An update has
        # 4 x 8 x 4 = 128 samples, 16 prompts, so a training step has 2 updates.
        "data.train_batch_size": 32,
        f"{ACTOR}ppo_mini_batch_size": 16,
        f"{ACTOR}ppo_micro_batch_size_per_gpu": 4,
        f"{ROLLOUT}n": 8,
        f"{ACTOR}optim.lr_warmup_steps": 10,
        "trainer.save_freq": 50,
        f"{ACTOR}optim.lr_scheduler_type": "linear",
        f"{ACTOR}optim.weight_decay": 0,
        f"{ACTOR}use_kl_loss": True,
        f"{ACTOR}kl_loss_coef": 0.04,
        f"{ACTOR}kl_loss_type": "low_var_kl+",
        f"{ACTOR}kl_loss_importance_weighted": True,
        f"{ACTOR}clip_ratio_c": 1e6,
        f"{ACTOR}loss_agg_mode": "token-mean",
        "algorithm.rollout_correction.rollout_is": "sequence",
        "algorithm.rollout_correction.rollout_is_threshold": "0_3",
        "algorithm.adv_estimator": "grpo",
        "data.max_response_length": 1024,
        "actor_rollout_ref.model.path": "Qwen/Qwen2.5-0.5B-Instruct",
        "actor_rollout_ref.model.lora_rank": 16,
        "actor_rollout_ref.model.target_modules": ["q_proj", "v_proj"],
        "custom_reward_function.path": "reward.py",
        "trainer.default_local_dir": "runs/grpo",
        "trainer.logger": ["console", "wandb"],
        "trainer.n_gpus_per_node": 8,
        "trainer.resume_mode": "disable",
    }
    assert {key: conversion.values.get(key) for key in expected} == expected
    assert [warning.typed for warning in conversion.warnings] == ["seed=int('3')"]
    comments = conversion.comments
    assert "accuracy_reward, format_reward" in comments["custom_reward_function.path"]
    assert "the script's dataset" in comments["data.train_files"]


def test_nothing_of_a_script_is_executed(script, tmp_path):
    bad = (
        f"GRPOConfig(output_dir=open({str(tmp_path / 'x')!r}, 'w'), seed=__import__('os').getpid())"
    )
    conversion = script(f"{bad}\nGRPOTrainer('m', f)")
    assert not (tmp_path / "x").exists()
    assert len(conversion.warnings) == 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x = 1", "calls none of GRPOConfig"),
        ("trl.RewardTrainer('m', a)", "serve a trained one, and set reward.remote.url"),
        ("x = '\0'", "cannot be read"),
        ("x = " + "-" * 100_000 + "1", "cannot be read"),
        ("def f(:", "line 1: invalid syntax"),
        ("GRPOConfig()\nGRPOConfig()", "several configurations (lines 1, 2)"),
        ("GRPOConfig()\nPPOTrainer()", "several configurations"),
        ("GRPOTrainer('m', f)\nGRPOConfig(lerning_rate=1)", "Did you mean learning_rate?"),
        ("GRPOTrainer('m', f, tools=[g])", "tools=[g]: has no counterpart in verlite"),
        ("GRPOTrainer(reward_funcs=f)", "model_name_or_path: is missing"),
    ],
)
def test_wrong_scripts(script, text, words):
    assert words in problems(script, text)


def test_variables_that_change_are_not_literals(script):
    text = "n = 4\nn = 8\nGRPOConfig(num_generations=n)\nGRPOTrainer('m', f)"
    assert [warning.typed for warning in script(text).warnings] == ["num_generations=n"]
    once = script(text.replace("n = 8\n", ""))
    assert (once.warnings, once.values[f"{ROLLOUT}n"]) == ([], 4)


@pytest.mark.parametrize(
    "change",
    [
        "n += 1",
        "for n in (1, 2): pass",
        "n: int = 4",
        "def main(n): pass",
        "with open('x') as n: pass",
        "print(n := 4)",
    ],
)
def test_variables_that_are_bound_twice_are_not_literals(script, change):
    text = f"n = 8\n{change}\nGRPOConfig(num_generations=n)\nGRPOTrainer('m', f)"
    assert [warning.typed for warning in script(text).warnings] == ["num_generations=n"]


def test_a_configuration_that_is_changed_later(script):
    text = "a = GRPOConfig(beta=0.1, num_generations=8)\na.beta = 0.5\n"
    text += "t = GRPOTrainer('m', f, args=a)\nt.state = 1"
    conversion = script(text)
    assert [warning.typed for warning in conversion.warnings] == ["beta=a.beta = ..."]
    assert f"{ACTOR}kl_loss_coef" not in conversion.values


def test_a_script_with_a_byte_order_mark(script):
    assert script("\ufeff" + SCRIPT) == script(SCRIPT)


def test_unpacked_arguments_are_named(script):
    conversion = script("GRPOConfig(**kwargs)\nGRPOTrainer(model=MODEL, reward_funcs=f)")
    assert [warning.typed for warning in conversion.warnings] == ["**kwargs"]
    assert conversion.comments["actor_rollout_ref.model.path"] == "the script's MODEL"


def test_unpacked_positional_arguments_are_named(script):
    conversion = script("GRPOConfig(*given)\nGRPOTrainer('m', f)")
    assert "**given" in [warning.typed for warning in conversion.warnings]


PARSER = """\"\"\"
First:
    accelerate launch --config_file x.yaml train.py \\\\
        --model_name_or_path Qwen/Qwen3-0.6B --dataset_name d.json --learning_rate 3e-6 \\\\
        --num_generations 4 --gradient_accumulation_steps=2 --no_bf16 {peft}
    python train.py --model_name_or_path other
\"\"\"
parser = TrlParser((ScriptArguments, GRPOConfig, ModelConfig))
script_args, training_args, model_args = parser.parse_args_and_config()
training_args.gradient_checkpointing_kwargs = dict(use_reentrant=False)
dataset = load_dataset(script_args.dataset_name)
trainer = GRPOTrainer(model=model_args.model_name_or_path, args=training_args, reward_funcs=[f],
    train_dataset=dataset[script_args.dataset_train_split], peft_config=get_peft_config(model_args),
    quantization_config=get_quantization_config(model_args))
"""


def test_a_parsers_script_has_the_values_of_the_command_line_that_it_documents(script, files):
    conversion = script(PARSER.format(peft=""))
    files.check(conversion)
    expected = {
        "actor_rollout_ref.model.path": "Qwen/Qwen3-0.6B",
        "actor_rollout_ref.model.lora_rank": None,
        f"{ACTOR}optim.lr": 3e-6,
        f"{ACTOR}fsdp_config.dtype": "float32",
        f"{ROLLOUT}n": 4,
        "data.train_batch_size": 32,
        "data.train_files": "d.parquet",
    }
    assert {key: conversion.values.get(key) for key in expected} == expected
    assert "accelerate launch --config_file x.yaml train.py" in conversion.defaults
    with_adapter = script(PARSER.format(peft="--use_peft --lora_r 32"))
    assert with_adapter.values["actor_rollout_ref.model.lora_rank"] == 32
    assert with_adapter.values["actor_rollout_ref.model.lora_alpha"] == 32


def test_what_a_parsers_script_sets_afterwards_is_not_the_command_lines(script):
    change = "training_args.learning_rate = 5e-7\ndataset ="
    conversion = script(PARSER.format(peft="").replace("dataset =", change, 1))
    assert conversion.values.get(f"{ACTOR}optim.lr") != 3e-6
    assert [w.typed for w in conversion.warnings if "learning_rate" in w.typed]


def test_a_parsers_script_without_values_is_refused(script, tmp_path):
    text = PARSER.format(peft="").partition('"""')[2].partition('"""')[2]
    words = problems(script, text)
    assert "takes its settings from the command line, and documents none" in words
    assert "Give the values: verlite convert trl" in words
    typed = "--model_name_or_path m --dataset_name d.json --use_peft".split()
    conversion = trl.convert(tmp_path / "train.py", words=typed)
    assert conversion.values["actor_rollout_ref.model.path"] == "m"
    assert conversion.values["actor_rollout_ref.model.lora_rank"] == 16


def test_a_command_line(tmp_path):
    (tmp_path / "r.yaml").write_text("beta: 0.1\nlearning_rate: 1e-6\n")
    line = f"trl grpo --config {tmp_path}/r.yaml --model_name_or_path m --dataset_name d.json "
    line += '--learning_rate 2e-6 --report_to wandb tensorboard --lora_target_modules "a", "b" '
    line += "--use_peft --model_init_kwargs {} --optim=adamw_torch"
    values = trl.convert(None, words=line.replace('"', "").split()).values
    assert values[f"{ACTOR}kl_loss_coef"] == 0.1
    assert values[f"{ACTOR}optim.lr"] == 2e-6
    assert values["trainer.logger"] == ["console", "wandb", "tensorboard"]
    assert values["actor_rollout_ref.model.target_modules"] == ["a", "b"]


def test_each_tracker_is_converted_or_warned_about():
    line = "trl grpo --model_name_or_path m --dataset_name d.json --trackio_space_id me/runs "
    conversion = trl.convert(
        None, words=f"{line}--report_to mlflow clearml trackio swanlab".split()
    )
    assert conversion.values["trainer.logger"] == ["console", "mlflow", "trackio", "swanlab"]
    warned = {one.typed.partition("=")[0]: one.text for one in conversion.warnings}
    assert warned.keys() == {"trackio_*", "report_to"}
    assert "no tracker clearml" in warned["report_to"] and "trackers.md" in warned["report_to"]
    assert "TRACKIO_SPACE_ID" in warned["trackio_*"]


def test_all_trackers_are_to_be_named():
    line = "trl grpo --model_name_or_path m --dataset_name d.json --report_to all"
    conversion = trl.convert(None, words=line.split())
    assert "trainer.logger" not in conversion.values
    (warning,) = (one for one in conversion.warnings if one.typed.startswith("report_to"))
    assert warning.text.startswith("name the trackers that you want in trainer.logger: wandb")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("", "FILE: is missing"),
        ("python none.py --beta 0", "FILE=none.py: does not exist"),
        ("trl grpo m --beta 0", "m: is not an option"),
        ("trl grpo --beta $BETA", "--beta: the shell has not replaced $BETA"),
        ("trl grpo --bta 0", "bta=0: is not a setting of GRPOConfig. Did you mean beta?"),
    ],
)
def test_wrong_command_lines(line, words):
    assert words in problems(trl.convert, None, words=line.split())


def test_ellipses_are_not_values(script):
    conversion = script("GRPOConfig(beta=..., seed=1)\nGRPOTrainer(model=..., reward_funcs=f)")
    assert conversion.values["actor_rollout_ref.model.path"] == "MODEL"
    assert [warning.typed for warning in conversion.warnings] == ["beta=..."]


def test_a_model_that_the_script_loads(script):
    text = "m = AutoModelForCausalLM.from_pretrained('Qwen/Q', dtype=torch.bfloat16{})\n"
    text += "GRPOConfig()\nGRPOTrainer(m, f)"
    assert script(text.format("")).values["actor_rollout_ref.model.path"] == "Qwen/Q"
    changed = script(text.format(", num_hidden_layers=2"))
    assert changed.values["actor_rollout_ref.model.path"] == "MODEL"


def test_a_model_whose_name_is_a_variable(script):
    text = "NAME = 'Qwen/Q'\nm = AutoModelForCausalLM.from_pretrained(NAME)\n"
    text += "GRPOConfig()\nGRPOTrainer(m, f)"
    assert script(text).values["actor_rollout_ref.model.path"] == "Qwen/Q"


@pytest.mark.parametrize(
    ("loaded", "words"),
    [
        ("quantization_config=bits", "quantization_config=bits: has no counterpart"),
        ("load_in_4bit=True", "load_in_4bit: has no counterpart"),
        ("load_in_4bit=False", ""),
        ("quantization_config=None", ""),
    ],
)
def test_a_quantized_model_that_the_script_loads_is_refused(script, loaded, words):
    text = f"m = AutoModelForCausalLM.from_pretrained('m', {loaded})\nSFTTrainer(m, SFTConfig())"
    assert words in problems(script, text)
    assert bool(problems(script, text)) == bool(words)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("FastLanguageModel.from_pretrained(model_name='m', load_in_4bit=True)", "load_in_4bit"),
        ("AutoModelForCausalLM.from_pretrained('m', **options)", "quantization_config=bits"),
        ("get_peft_model(AutoModelForCausalLM.from_pretrained('m', **options))", "=bits"),
        ("'m'", ""),
    ],
)
def test_only_the_model_that_is_trained_must_not_be_quantized(script, model, words):
    text = "options = dict(quantization_config=bits)\n"
    text += "judge = AutoModelForCausalLM.from_pretrained('j', load_in_4bit=True)\n"
    text += f"model, tok = {model}, None\nSFTTrainer(model=model, args=SFTConfig())"
    assert words in problems(script, text.replace(", None", "").replace("model, tok", "model"))
    assert "load_in_4bit" in problems(script, text.replace("model=model", "model=judge"))
    if not words:
        inside = "SFTTrainer('m', SFTConfig(model_init_kwargs=dict(load_in_4bit=True)))"
        assert "load_in_4bit: has no counterpart" in problems(script, inside)


def test_bits_that_the_command_line_decides(script):
    text = "bits = get_quantization_config(args)\nparser = TrlParser(ModelConfig)\n"
    text += "(args,) = parser.parse_args_and_config()\nc = SFTConfig()\n"
    text += "m = AutoModelForCausalLM.from_pretrained('m', quantization_config=bits)\n"
    assert "quantization" not in problems(script, f"{text}SFTTrainer(m, c)")


def test_a_resume_is_asked_for_in_train(script):
    text = "t = SFTTrainer('m', SFTConfig(resume_from_checkpoint=None))\nt.train({})"
    given = ("", "resume_from_checkpoint=False", "resume_from_checkpoint=True", "True")
    modes = [script(text.format(one)).values["trainer.resume_mode"] for one in given]
    assert modes == ["disable", "disable", "auto", "auto"]
    of_model = script(f"m.train(True)\n{text.format('')}")
    assert of_model.values["trainer.resume_mode"] == "disable"
    other = script(text.format("resume_from_checkpoint='out/checkpoint-5'"))
    assert "verlite cannot load checkpoints of TRL" in [w.text for w in other.warnings]


def test_a_chat_template_that_the_script_sets(script, files):
    text = "tokenizer.chat_template = {}\nSFTTrainer('m', SFTConfig())"
    literal = script(text.format("'{{ messages }}'"), 1)
    files.check(literal)
    assert literal.values["model.custom_chat_template"] == "{{ messages }}"
    lines = (
        text.format("read()"),
        text.format("None"),
        f"if tokenizer.chat_template is None:\n    {text.format(repr('{{ m }}'))}",
        "m, t = setup_chat_format(m, t)\nSFTTrainer(m)",
    )
    for line in lines:
        warned = [warning.text for warning in script(line).warnings]
        assert "the script computes it: set model.custom_chat_template yourself" in warned


OWN_TRAINER = """
class First(trl.SFTTrainer):
    pass
class Mine(First):
    def {}(self): ...
Mine('m', SFTConfig(learning_rate=1e-4))
"""


def test_a_trainer_of_the_scripts_own(script):
    assert script(OWN_TRAINER.format("log")).values["model.path"] == "m"
    assert script(OWN_TRAINER.replace("def {}", "_tag_names = ['x']\n    def log"))
    found = problems(script, OWN_TRAINER.format("_compute_loss"))
    assert "Mine._compute_loss: is a part of the script's own class" in found
    for part in ("def compute_loss", "async def compute_loss", "compute_loss = f\n    def log"):
        found = problems(script, OWN_TRAINER.replace("def {}", part))
        assert "Mine.compute_loss: is a part of the script's own class" in found
    begun = problems(script, OWN_TRAINER.format("__init__"))
    assert "Mine.__init__" in begun
    unused = OWN_TRAINER.format("compute_loss").replace("\nMine(", "\nFirst(")
    assert not problems(script, unused)


def test_a_configuration_of_the_scripts_own(script):
    text = "class C(SFTConfig):\n    {}\nSFTTrainer('m', C(learning_rate=1e-4))"
    assert script(text.format("pass")).values["optim.lr"] == 1e-4
    assert "C.beta: is a part" in problems(script, text.format("beta: float = 0.1"))


def test_unpacked_literals_are_settings(script):
    text = "a = dict(beta=0.1)\nb = {'r': 4}\n"
    text += "GRPOConfig(**a)\nGRPOTrainer('m', f, peft_config=LoraConfig(**b))"
    conversion = script(text)
    assert conversion.values[f"{ACTOR}kl_loss_coef"] == 0.1
    assert conversion.values["actor_rollout_ref.model.lora_rank"] == 4
    for change in ("a['beta'] = 1", "a.update(beta=1)"):
        changed = script(text.replace("GRPOConfig", f"{change}\nGRPOConfig"))
        assert [warning.typed for warning in changed.warnings] == ["**a"]
    alias = script(text.replace("GRPOConfig", "other = a\nother['beta'] = 1\nGRPOConfig"))
    assert [warning.typed for warning in alias.warnings] == ["**a"]
    computed = script(text.replace("**a", "**some()").replace("**b", "**adapter()"))
    typed = {warning.typed for warning in computed.warnings}
    assert typed >= {"**adapter()", "**some()"}


@pytest.mark.parametrize("value", ["get_peft_config(args)", "config", "make()"])
def test_an_adapter_that_the_script_computes_is_refused(script, value):
    text = f"GRPOConfig()\nGRPOTrainer('m', f, peft_config={value})"
    assert f"peft_config={value}: is computed by the script" in problems(script, text)
    assert "lora_rank=8" in " ".join(script(f"config = LoraConfig()\n{text}").overrides)


@pytest.mark.parametrize(
    "text",
    [
        "processor = AutoProcessor.from_pretrained(x)\nGRPOConfig()\nGRPOTrainer('m', f)",
        "d.map(lambda row: row['image'])\nGRPOConfig()\nGRPOTrainer('m', f)",
        "GRPOConfig()\nGRPOTrainer('Qwen/Qwen2.5-VL-3B-Instruct', f)",
        "GRPOConfig()\nGRPOTrainer('HuggingFaceTB/SmolVLM2-2.2B-Instruct', f)",
    ],
)
def test_training_on_images_is_refused(script, text):
    assert "verlite trains on text" in problems(script, text)
    assert problems(script, "GRPOConfig()\nGRPOTrainer('Qwen/Qwen2.5-Devl-3B', f)") == ""


@pytest.mark.parametrize(
    "text",
    [
        "GRPOConfig('image')",
        "GRPOConfig(output_dir='images')",
        "'image'  # image\nGRPOConfig()",
        "folder = 'images'\nos.path.join('x', 'image')\nGRPOConfig()",
        "image = docker.image('x')\nGRPOConfig()",
    ],
)
def test_a_path_named_image_is_no_training_on_images(script, text):
    assert problems(script, f"{text}\nGRPOTrainer('m', f)") == ""


# A YAML file


def test_the_yaml_file(files):
    conversion = trl.convert(SAMPLES / "convert/trl_grpo.yaml", 2)
    files.check(conversion)
    expected = {
        "data.train_batch_size": 4,
        f"{ACTOR}ppo_mini_batch_size": 4,
        f"{ACTOR}loss_agg_mode": "seq-mean-token-sum-norm",
        "algorithm.norm_adv_by_std_in_grpo": False,
        f"{ACTOR}optim.lr_scheduler_type": "cosine",
        f"{ACTOR}optim.lr_warmup_steps_ratio": 0.1,
        "data.max_prompt_length": 256,
        "trainer.total_epochs": 1,
        "trainer.save_freq": None,
    }
    assert {key: conversion.values.get(key) for key in expected} == expected
    assert conversion.before == [
        "hf download --repo-type dataset trl-lib/DeepMath-103K --include '*train*' "
        "--local-dir data/DeepMath-103K-train",
        "python data_preprocess/chat_json.py --dataset data/DeepMath-103K-train "
        "--input_key prompt --output data/DeepMath-103K-train.parquet",
    ]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"loss_type": "grpo"}, {f"{ACTOR}loss_agg_mode": "seq-mean-token-mean"}),
        (
            {"beta": 0.1},
            {f"{ACTOR}kl_loss_type": "low_var_kl+", f"{ACTOR}kl_loss_importance_weighted": None},
        ),
        (
            {"beta": 0.1, "num_iterations": 2},
            {f"{ACTOR}kl_loss_type": "low_var_kl+", f"{ACTOR}kl_loss_importance_weighted": True},
        ),
        (
            {"beta": 0.1, "num_iterations": 2, "use_bias_correction_kl": False},
            {f"{ACTOR}kl_loss_type": "low_var_kl", f"{ACTOR}kl_loss_importance_weighted": None},
        ),
        (
            {"loss_type": "grpo", "importance_sampling_level": "sequence"},
            {f"{ACTOR}policy_loss.loss_mode": "gspo", f"{ACTOR}clip_ratio_c": None},
        ),
        (
            {"loss_type": "cispo", "epsilon_high": 5.0},
            {f"{ACTOR}policy_loss.loss_mode": "cispo", f"{ACTOR}clip_ratio_high": 4.0},
        ),
        (
            {"loss_type": "sapo", "sapo_temperature_neg": 1.2},
            {f"{ACTOR}policy_loss.loss_mode": "sapo", f"{ACTOR}tau_neg": 1.2},
        ),
        ({"delta": 1.5}, {f"{ACTOR}clip_ratio_c": 1.5}),
        ({"epsilon_high": 0.28}, {f"{ACTOR}clip_ratio_high": 0.28}),
        ({"scale_rewards": False}, {"algorithm.norm_adv_by_std_in_grpo": False}),
        (
            {"num_iterations": 2, "save_steps": 10},
            {f"{ACTOR}ppo_epochs": 2, "trainer.save_freq": 5},
        ),
        ({"max_steps": 30}, {"trainer.total_training_steps": 30, "trainer.total_epochs": None}),
        ({"generation_batch_size": 32}, {"data.train_batch_size": 4}),
        ({"top_k": 50}, {f"{ROLLOUT}top_k": 50}),
        ({"mask_truncated_completions": True}, {"algorithm.mask_truncated": True}),
        (
            {"use_vllm": True, "vllm_importance_sampling_mode": "token_truncate"},
            {"algorithm.rollout_correction.rollout_is_threshold": 3.0},
        ),
        (
            {"use_vllm": True, "vllm_importance_sampling_correction": False},
            {"algorithm.rollout_correction.rollout_is": None},
        ),
        ({"use_peft": True}, {"actor_rollout_ref.model.lora_alpha": 32}),
        (
            {
                "lr_scheduler_type": "cosine_with_min_lr",
                "lr_scheduler_kwargs": {"min_lr_rate": 0.1},
            },
            {f"{ACTOR}optim.min_lr_ratio": 0.1},
        ),
        (
            {"eval_dataset": "v.json", "eval_strategy": "steps", "eval_steps": 7},
            {"trainer.test_freq": 7, "trainer.val_before_train": False},
        ),
        ({"bf16": False}, {f"{ACTOR}fsdp_config.dtype": "float32"}),
    ],
)
def test_settings(grpo, files, settings, expected):
    conversion = grpo(**settings)
    files.check(conversion)
    assert {key: conversion.values.get(key) for key in expected} == expected


def test_rloo(grpo, files):
    conversion = grpo("rloo", reward_clip_range=[-1, 1])
    files.check(conversion)
    expected = {
        "algorithm.adv_estimator": "rloo",
        "algorithm.use_kl_in_reward": True,
        "algorithm.kl_ctrl.kl_coef": 0.05,
        "reward.clip_range": [-1, 1],
        f"{ROLLOUT}n": 2,
        f"{ACTOR}loss_agg_mode": "seq-mean-token-sum",
    }
    assert {key: conversion.values.get(key) for key in expected} == expected


def test_ppo(tmp_path, files):
    settings = {
        "sft_model_path": "m",
        "reward_model_path": "r",
        "dataset_name": "d.json",
        "total_episodes": 1000,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "num_mini_batches": 2,
        "num_ppo_epochs": 4,
    }
    (tmp_path / "ppo.yaml").write_text(yaml.safe_dump(settings))
    conversion = trl.convert(tmp_path / "ppo.yaml", 2)
    files.check(conversion)
    expected = {
        "algorithm.adv_estimator": "gae",
        "data.train_batch_size": 16,
        f"{ACTOR}ppo_mini_batch_size": 8,
        f"{ACTOR}ppo_epochs": 4,
        "trainer.total_training_steps": 63,
        "algorithm.lam": 0.95,
        "algorithm.kl_ctrl.kl_coef": 0.05,
        "critic.cliprange_value": 0.2,
        f"{ACTOR}optim.lr": 3e-6,
        "data.max_response_length": 53,
        f"{ROLLOUT}temperature": 0.7,
    }
    assert {key: conversion.values.get(key) for key in expected} == expected


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"num_generations": "eight"}, "num_generations=eight: must be a number"),
        ({"num_generations": None}, "num_generations: must be a number"),
        ({"num_generations": 0}, "num_generations=0: must be at least 1"),
        ({"max_steps": float("inf")}, "max_steps=inf: must be a finite number"),
        ({"learning_rate": [1e-6]}, "learning_rate=1e-06: must be a number"),
        ({"bf16": "yes"}, "bf16=yes: must be true or false"),
        ({"loss_type": ["dapo"]}, "loss_type=dapo: must be one value"),
        ({"report_to": {"a": "b"}}, "report_to={a:b}: must be a list of texts or numbers"),
        ({"num_generations": 3}, "not a multiple of num_generations=3"),
        ({"gradient_accumulation_steps": 4, "steps_per_generation": 2}, "spans generations"),
        ({"loss_type": "vespo"}, "loss_type=vespo: has no counterpart"),
        ({"scale_rewards": "batch"}, "scale_rewards=batch"),
        ({"loss_type": "cispo"}, "loss_type=cispo needs it"),
        ({"importance_sampling_level": "sequence"}, "GSPO"),
        (
            {"importance_sampling_level": "sequence", "loss_type": "grpo", "beta": 0.1},
            "Set use_bias_correction_kl to False",
        ),
        ({"min_p": 0.1}, "min_p=0.1: has no counterpart"),
        ({"repetition_penalty": 1.1}, "the policy's own distribution"),
        ({"sync_ref_model": True}, "reference is the initial policy"),
        ({"optim": "adafactor"}, "optimizer is AdamW"),
        ({"fp16": True}, "Use bf16"),
        ({"lr_scheduler_type": "polynomial"}, "has no counterpart"),
        ({"num_train_epochs": 1.5}, "must be a whole number"),
        ({"load_in_4bit": True}, "quantized models is not supported"),
        ({"lora_r": 8, "lora_dropout": 0.1}, "without dropout"),
        ({"num_generation": 8}, "Did you mean num_generations?"),
    ],
)
def test_what_would_change_training_is_refused(grpo, settings, words):
    assert words in problems(grpo, **settings)


@pytest.mark.parametrize("empty", [None, ""])
def test_settings_without_a_value_are_not_copied(grpo, empty):
    names = ("output_dir", "run_name", "project")
    settings = dict.fromkeys(names, empty) | {"seed": 7, "data_seed": None}
    assert grpo(**settings).values == grpo(seed=7).values
    assert grpo(seed=7).values["data.seed"] == 7


# SFT and DPO

SFT_LINE = (
    "trl sft --model_name_or_path m --dataset_name d.jsonl --per_device_train_batch_size 2 "
    "--gradient_accumulation_steps 8 --num_train_epochs 1 --output_dir out --eval_strategy steps "
    "--eval_steps 100 --warmup_ratio 0.1 --use_peft --report_to wandb"
)


def test_sft(files):
    conversion = trl.convert(None, 4, words=SFT_LINE.split())
    files.check(conversion)
    assert conversion.launch == "torchrun --nproc_per_node 4 -m"
    assert conversion.values == {
        "data.train_files": "d.jsonl",
        "data.val_files": "d.jsonl",
        "data.train_batch_size": 64,  # 2 rows x 8 x 4 processes
        "data.max_length": 1024,
        "data.truncation": "right",
        "data.micro_batch_size_per_gpu": 2,
        "data.response_key": "completion",
        "model.path": "m",
        "model.lora_rank": 16,
        "model.lora_alpha": 32,
        "model.target_modules": "all-linear",
        "optim.lr": 2e-5,
        "optim.lr_scheduler_type": "linear",
        "optim.lr_warmup_steps_ratio": 0.1,
        "optim.min_lr_ratio": 0.0,
        "optim.weight_decay": 0.0,
        "fsdp_config.dtype": "bfloat16",
        "trainer.total_epochs": 1,
        "trainer.default_local_dir": "out",
        "trainer.resume_mode": "disable",
        "trainer.logger": ["console", "wandb"],
        "trainer.test_freq": 100,
        "trainer.save_freq": 500,
    }
    assert "assistant_only_loss" in conversion.comments["data.train_files"]


def test_dpo(script, files):
    conversion = script(
        "m = AutoModelForCausalLM.from_pretrained('Qwen/Q')\n"
        "a = DPOConfig('out', beta=0.2, max_length=2048, learning_rate=5e-7, max_steps=100)\n"
        "DPOTrainer(m, args=a, train_dataset=load_dataset('x/y'), processing_class=t)",
        1,
    )
    files.check(conversion)
    expected = {
        "beta": 0.2,
        "model.path": "Qwen/Q",
        "data.max_length": 2048,
        "data.train_batch_size": 8,
        "optim.lr": 5e-7,
        "trainer.total_training_steps": 100,
        "trainer.total_epochs": None,
        "data.train_files": "train.parquet",
    }
    assert {key: conversion.values.get(key) for key in expected} == expected
    assert text.command(conversion).count("python -m verlite.main_dpo ") == 1
    assert "defaults:\n  - dpo\n  - _self_" in text.yaml_text(conversion)


def test_data_of_the_hub_is_written_once():
    words = "trl dpo --model_name_or_path m --dataset_name org/d --eval_strategy steps".split()
    conversion = trl.convert(None, 1, words=words)
    assert conversion.values["data.train_files"] == "data/d-train.parquet"
    assert conversion.values["data.val_files"] == "data/d-test.parquet"
    assert conversion.before[0] == (
        "python -c 'from datasets import load_dataset; load_dataset('\"'\"'org/d'\"'\"', "
        "split='\"'\"'train'\"'\"').to_parquet('\"'\"'data/d-train.parquet'\"'\"')'"
    )


def test_packed_batches_are_named():
    conversion = trl.convert(None, 1, words=f"{SFT_LINE} --packing".split())
    assert "TRL counts packed sequences" in conversion.comments["data.train_batch_size"]


@pytest.mark.parametrize(
    ("trainer", "option", "words"),
    [
        ("sft", "--loss_type dft", "loss_type=dft: has no counterpart"),
        ("sft", "--completion_only_loss false", "verlite trains on responses"),
        ("sft", "--truncation_mode keep_end", "cuts longer rows at their end"),
        ("sft", "--chat_template_path x", "Set model.custom_chat_template to its text"),
        ("sft", "--learning_rte 1", "is not a setting of SFTConfig. Did you mean learning_rate?"),
        ("dpo", "--loss_type sigmoid bco_pair", "verlite has sigmoid"),
        ("dpo", "--label_smoothing 0.1", "verlite has the loss of the paper"),
        ("dpo", "--beta 0", "beta=0.0: must be > 0"),
        ("dpo", "--ref_model other", "reference is the model at the start"),
    ],
)
def test_what_would_change_tuning_is_refused(trainer, option, words):
    line = f"trl {trainer} --model_name_or_path m --dataset_name d.jsonl {option}"
    assert words in problems(trl.convert, None, 1, words=line.split())


# Versions


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        # Read off GRPOConfig of each tag.
        ("v0.15.0", (0.04, 0.9, 50, 256, 512, "seq-mean-token-mean", "float32", 8)),
        ("0.17", (0.04, 0.9, 50, 256, 512, "token-mean", "float32", 8)),
        ("0.18.1", (0.04, 1.0, -1, 256, 512, "token-mean", "float32", 8)),
        ("0.22", (None, 1.0, -1, 256, 512, "token-mean", "bfloat16", 8)),
        ("1.16", (None, 1.0, -1, 512, 512, "token-mean", "bfloat16", 8)),
    ],
)
def test_defaults_of_a_version(tmp_path, version, expected):
    (tmp_path / "t.py").write_text("GRPOConfig('out')\nGRPOTrainer('m', f)")
    conversion = trl.convert(tmp_path / "t.py", 8, version=version)
    names = (
        f"{ACTOR}kl_loss_coef",
        f"{ROLLOUT}temperature",
        f"{ROLLOUT}top_k",
        "data.max_response_length",
        "data.max_prompt_length",
        f"{ACTOR}loss_agg_mode",
        f"{ACTOR}fsdp_config.dtype",
        f"{ACTOR}ppo_micro_batch_size_per_gpu",
    )
    found = [conversion.values.get(key, PPO.keys[key].default) for key in names]
    if "actor_rollout_ref.actor.use_kl_loss" not in conversion.values:
        found[0] = None
    assert tuple(found) == expected
    assert conversion.defaults.startswith(f"Defaults of TRL {version} (--source-version).")


def test_the_defaults_of_other_versions_are_named(grpo):
    assert "beta (0.04 before 0.19)" in grpo().defaults
    assert "loss_type (grpo before 0.17, bnpo before 0.22)" in grpo().defaults
    assert "beta" not in grpo(beta=0.1).defaults


@pytest.mark.parametrize("version", ["0.13", "1.17", "99", "latest", ""])
def test_an_unknown_version_is_refused(tmp_path, version):
    (tmp_path / "t.yaml").write_text("model_name_or_path: m\ndataset_name: d.json\n")
    words = problems(trl.convert, tmp_path / "t.yaml", version=version or " ")
    assert "Known are 0.15 to 1.16: give the nearest one" in words


def test_a_patch_of_the_newest_version_is_known(tmp_path):
    (tmp_path / "t.yaml").write_text("model_name_or_path: m\ndataset_name: d.json\n")
    assert trl.convert(tmp_path / "t.yaml", version="1.16.3").problems == []


@pytest.mark.parametrize("trainer", TABLES)
def test_changed_defaults_lead_to_those_of_the_table(trainer):
    check_changes(TABLES[trainer])


def test_more_processes_than_a_node_has(script):
    conversion = script("GRPOConfig()\nGRPOTrainer('m', f)", 16)
    assert conversion.values["trainer.nnodes"] == 2
    assert "--gpus=12" in problems(script, "GRPOConfig()\nGRPOTrainer('m', f)", 12)


ACCELERATE = "num_machines: 2\nnum_processes: 8\n"


@pytest.mark.parametrize(
    ("start", "nodes", "per_node"),
    [
        ("accelerate launch --num_machines 2 --num_processes=8", 2, 4),
        ("accelerate launch --num-processes 4", 1, 4),
        ("accelerate launch --config_file FILE", 2, 4),
        ("accelerate launch --config_file FILE --num_processes 16", 2, 8),
        ("torchrun --nnodes 2 --nproc-per-node 4", 2, 4),
        ("deepspeed --num_nodes=3 --num_gpus 8", 3, 8),
        ("deepspeed --hostfile HOSTS", 2, 8),
        ("python", 1, 8),
    ],
)
def test_processes_are_those_that_the_launcher_starts(tmp_path, start, nodes, per_node):
    (tmp_path / "a.yaml").write_text(ACCELERATE)
    (tmp_path / "hosts").write_text("# all\na slots=8\nb slots=8\n")
    start = start.replace("FILE", str(tmp_path / "a.yaml")).replace(
        "HOSTS", str(tmp_path / "hosts")
    )
    options = "--model_name_or_path m --dataset_name d.json"
    grpo = trl.convert(None, words=[*start.split(), "grpo.py", *options.split()])
    found = [grpo.values.get(f"trainer.{key}", 1) for key in ("nnodes", "n_gpus_per_node")]
    assert (found, grpo.problems) == ([nodes, per_node], [])
    samples = grpo.values["data.train_batch_size"] * 8
    assert samples == nodes * per_node * 8, "TRL's batch size of 8 is per process"
    sft = trl.convert(None, words=[*start.split(), "sft.py", *options.split()])
    several = f"--nnodes {nodes} --rdzv_backend c10d --rdzv_endpoint FIRST_HOST:29500 "
    several = several if nodes > 1 else ""
    assert sft.launch == f"torchrun {several}--nproc_per_node {per_node} -m"
    assert (f"Start it on each of the {nodes} hosts" in sft.defaults) == (nodes > 1)
    assert sft.values["data.train_batch_size"] == nodes * per_node * 8


def test_sixteen_processes_of_sft_are_two_hosts(script):
    conversion = script("SFTConfig()\nSFTTrainer('m')", 16)
    assert "--nnodes 2 " in conversion.launch and "--nproc_per_node 8 -m" in conversion.launch


@pytest.mark.parametrize("content", [None, "a: [", BOMB])
def test_a_launchers_file_that_cannot_be_read_is_named(tmp_path, content):
    if content:
        (tmp_path / "a.yaml").write_text(content)
    start = f"accelerate launch --config_file {tmp_path}/a.yaml grpo.py"
    words = [*start.split(), "--model_name_or_path", "m", "--dataset_name", "d.json"]
    assert f"{tmp_path}/a.yaml is not read" in trl.convert(None, words=words).defaults


def test_rows_that_trl_does_not_cut_end_the_run_if_they_are_too_long(script):
    conversion = script("SFTConfig(max_length=None)\nSFTTrainer('m')")
    assert conversion.problems == [] and conversion.values["data.max_length"] == 8192
    assert conversion.values.get("data.truncation", "error") == "error"
    assert "set the length of your longest" in conversion.comments["data.max_length"]


@pytest.mark.parametrize(
    ("text", "why"),
    [(BOMB, "100,000 values, aliases included"), ("seed: 0x" + "f" * 500, "more than 400 digits")],
)
def test_yaml_that_is_more_than_its_text_is_refused(tmp_path, text, why):
    (tmp_path / "t.yaml").write_text(text)
    assert why in problems(trl.convert, tmp_path / "t.yaml")
