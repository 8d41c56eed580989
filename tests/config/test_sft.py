"""main_sft reports each invalid key before it loads anything, and exits with code 2."""

import json
import re
from functools import partial

import pytest
from typer.testing import CliRunner

from tests.config.conftest import texts, write_prompts
from verlite.cli import app
from verlite.config import ConfigError, keys, load, translation
from verlite.config.commands import PPO, SFT
from verlite.config.sources import from_our_yaml
from verlite.main_sft import main

compose = partial(load.compose, command=SFT)

WRONG = [
    ("data.train_files=null", "data.train_files", "must name at least one file"),
    ("data.train_files=[]", "data.train_files", "must name at least one file"),
    (
        "data.train_files={a:1}",
        "data.train_files",
        "expected a file or a list of files, got a mapping",
    ),
    ("data.max_length=0", "data.max_length", "must be >= 1"),
    ("data.truncation=left", "data.truncation", "is not a legal name; Legal: error, right."),
    ("optim.lr=-1", "optim.lr", "must be >= 0"),
    ("optim.betas=[0.9]", "optim.betas", "must be two numbers"),
    ("grad_clip=0", "grad_clip", "must be > 0"),
    (
        "fsdp_config.dtype=float16",
        "fsdp_config.dtype",
        "is not a legal name; Legal: auto, float32, bfloat16. Gradients in float16 need a loss "
        "scaler, which verlite does not have; bfloat16 needs none.",
    ),
    ("fsdp_config.fsdp_size=2", "fsdp_config.fsdp_size", "must divide the 1 processes"),
    (
        "fsdp_config.use_torch_compile=true model.enable_gradient_checkpointing=attention",
        "model.enable_gradient_checkpointing",
        "layers that fsdp_config.use_torch_compile=true compiles cannot keep a part",
    ),
    (
        "ulysses_sequence_parallel_size=2",
        "ulysses_sequence_parallel_size",
        "must divide the 1 processes; torchrun",
    ),
    (
        "data.use_dynamic_bsz=false",
        "data.use_dynamic_bsz",
        "needs data.micro_batch_size_per_gpu; or use_dynamic_bsz=true",
    ),
    ("optim.betas='[0.9,0.95]'", "optim.betas", "make it a text; Write optim.betas=[0.9,0.95]"),
    ("engine=megatron", "engine", "only fsdp is accepted"),
    ("engine.tensor_model_parallel_size=2", "engine.tensor_model_parallel_size", "fsdp_config has"),
    ("trainer.save_freq=-2", "trainer.save_freq", "must be >= 1 or -1"),
    ("trainer.save_freq=each_epoch", "trainer.save_freq", "Did you mean after_each_epoch?"),
    ("trainer.save_freq=2.5", "trainer.save_freq", "expected whole number or text, got a number"),
    ("trainer.test_freq=after_each_epoch", "trainer.test_freq", "needs validation data"),
    ("trainer.max_runtime=soon", "trainer.max_runtime", "is not a duration such as 14400, 90m"),
    ("trainer.resume_mode=resume_path", "trainer.resume_from_path", "must be given with"),
    ("optim.min_lr=1e-6", "optim.min_lr", "min_lr_ratio"),
    ("optim.lrs=1e-6", "optim.lrs", "unknown key; Did you mean optim.lr?"),
    ("trainer.test_freq=-2", "trainer.test_freq", "must be >= 1 or -1"),
    ("trainer.seed=-1", "trainer.seed", "must be >= 0"),
    ("trainer.device=cuda", "trainer.device", "shows no GPU"),
    ("model.path=/nonexistent", "model.path", "this folder does not exist; on the hub"),
    (
        "model.tokenizer_path=/nonexistent",
        "model.tokenizer_path",
        "this folder does not exist; on the hub",
    ),
    ("model.path={folder}/train.parquet", "model.path", "is a file, not a model folder"),
    ("model.path={folder}/odd/halved", "model.path", "b is missing, and its model.safetensors"),
    ("model.path={folder}/odd/cut", "model.path", "its a.safetensors is incomplete or broken"),
    (
        "trainer.default_local_dir={folder}/train.parquet/run",
        "trainer.default_local_dir",
        "is a file",
    ),
]


def line(material, *overrides: str) -> list[str]:
    right = [
        f"data.train_files={material.folder}/train.parquet",
        f"model.path={material.folder}/model",
    ]
    return [*right, f"trainer.default_local_dir={material.folder}/sft", *overrides]


@pytest.mark.parametrize(("typed", "key", "words"), WRONG, ids=[typed for typed, _, _ in WRONG])
def test_invalid_value_is_reported_under_its_key(material, typed, key, words):
    with pytest.raises(ConfigError) as error:
        compose(
            overrides=line(material, *typed.replace("{folder}", str(material.folder)).split(" "))
        )
    (problem,) = error.value.problems
    assert problem.key == key
    for part in words.split("; "):
        assert part in str(problem)


def test_valid_command_line(material):
    loaded = compose(overrides=line(material, "trainer.experiment_name=2024_11"))
    assert loaded.config.trainer.experiment_name == "2024_11"


RENAMES = [
    ("model.partial_pretrain={folder}/model", "model.path", "{folder}/model"),
    ("model.lora.rank=8", "model.lora_rank", 8),
    ("data.multiturn.messages_key=chats", "data.messages_key", "chats"),
    ("data.multiturn.tools_key=functions", "data.tools_key", "functions"),
    ("use_remove_padding=False", "model.use_remove_padding", False),
    ("optim.warmup_steps_ratio=0.5", "optim.lr_warmup_steps_ratio", 0.5),
    ("optim.lr_scheduler=constant", "optim.lr_scheduler_type", "constant"),
    ("optim.warmup_style=null", "optim.lr_scheduler_type", "constant"),
    ("optim.clip_grad=0.5", "grad_clip", 0.5),
    ("engine.fsdp_size=1", "fsdp_config.fsdp_size", 1),
    ("engine.model_dtype=bf16", "fsdp_config.model_dtype", "bfloat16"),
    ("model.fsdp_config.model_dtype=fp32", "fsdp_config.model_dtype", "float32"),
    ("engine.ulysses_sequence_parallel_size=1", "ulysses_sequence_parallel_size", 1),
]


@pytest.mark.parametrize(("typed", "new", "value"), RENAMES, ids=[typed for typed, _, _ in RENAMES])
def test_renamed(material, typed, new, value):
    folder = str(material.folder)
    words = [word for word in line(material) if not word.startswith(f"{new}=")]
    loaded = compose(overrides=[*words, typed.replace("{folder}", folder)])
    expected = value.replace("{folder}", folder) if isinstance(value, str) else value
    assert keys.get(loaded.config, new) == expected
    old = typed.split("=")[0]
    notes = [note for note in texts(loaded) if "its defaults apply" not in note]
    assert notes == [f"{old} is now called {new}"]


def test_keys_that_stand_for_two(material):
    for old in ("engine.offload_policy", "model.fsdp_config.cpu_offload"):
        loaded = compose(overrides=line(material, f"{old}=True"))
        fsdp = loaded.config.fsdp_config
        assert (fsdp.param_offload, fsdp.optimizer_offload) == (True, True)


def test_accepted_without_effect(material):
    typed = [
        "engine=fsdp",
        "optim=fsdp",
        "model=hf_model",
        "model.use_liger=True",
        "engine.strategy=fsdp2",
        "engine.forward_prefetch=True",
        "data.multiturn.enable=True",
        "data.multiturn.enable_thinking_key=enable_thinking",
        "data.pad_mode=no_padding",
        "trainer.checkpoint.save_contents=[model]",
        "trainer.n_gpus_per_node=4",
        "data.balance_dp_token=False",
    ]
    given = [
        "optim.lr=1e-5",
        "optim.betas=[0.9,0.95]",
        "optim.lr_warmup_steps=3",
        "optim.lr_scheduler_type=cosine",
        "optim.min_lr_ratio=0.1",
    ]
    loaded = compose(overrides=line(material, *typed, *given))
    plain = compose(overrides=line(material, *given)).config
    plain.optim.lr_warmup_steps_ratio = 0.1  # not used
    assert loaded.config == plain
    ignored = ", ".join(note.text for note in loaded.notes if note.kind == "ignored")
    (taken,) = [note.text for note in loaded.notes if note.kind != "ignored"]
    assert taken.endswith("apply: optim.lr_warmup_steps_ratio=0.1. Give a key to choose otherwise")
    assert all(one.split("=")[0] in ignored for one in typed)


OLD_TRAINER = (1e-5, [0.9, 0.95], 0.1, "cosine", 0.0)
NEW_TRAINER = (1e-3, [0.9, 0.999], 0.0, "constant", 0.0)
OURS = (1e-5, [0.9, 0.999], 0.03, "cosine", 0.1)
STYLES = [
    # The defaults of verl 0.5's sft_trainer.yaml and of its development version's optim/fsdp.yaml.
    (("model.partial_pretrain=$MODEL",), OLD_TRAINER),
    (("model.path=$MODEL", "engine=fsdp"), NEW_TRAINER),
    (("model.path=$MODEL", "optim.clip_grad=1.0"), NEW_TRAINER),
    (("model.path=$MODEL", "model.use_remove_padding=true"), OURS),
    (("model.partial_pretrain=$MODEL", "engine=fsdp", "optim.lr=3e-6"), (3e-6, *OLD_TRAINER[1:])),
    (
        ("model.partial_pretrain=$MODEL", "optim.betas=[0.9,0.999]", "optim.min_lr_ratio=0.1"),
        (1e-5, [0.9, 0.999], 0.1, "cosine", 0.1),
    ),
    (
        ("model.path=$MODEL", "trainer.nnodes=1", "optim.lr_scheduler_type=cosine"),
        (1e-3, [0.9, 0.999], 0.0, "cosine", 0.0),
    ),
]


@pytest.mark.parametrize("given, expected", STYLES)
def test_verls_key_names_have_verls_defaults(material, given, expected):
    own = [one for one in line(material) if not one.startswith("model.path=")]
    given = [one.replace("$MODEL", str(material.folder / "model")) for one in given]
    loaded = compose(overrides=[*own, *given])
    optim = loaded.config.optim
    found = (optim.lr, optim.betas, optim.lr_warmup_steps_ratio, optim.lr_scheduler_type)
    assert (*found, optim.min_lr_ratio) == expected
    notes = [note for note in texts(loaded) if "its defaults apply" in note]
    assert len(notes) == (expected != OURS)


def test_the_note_on_verls_defaults_lists_those_that_differ(material):
    (note,) = [
        note
        for note in texts(compose(overrides=line(material, "trainer.nnodes=1", "optim.lr=1e-4")))
        if "apply" in note
    ]
    assert note == (
        "trainer.nnodes is a name of verl's sft_trainer, so its defaults apply: "
        "optim.lr_warmup_steps_ratio=0.0, optim.lr_scheduler_type=constant, "
        "optim.min_lr_ratio=0.0. Give a key to choose otherwise"
    )
    loaded = compose("sft_trainer_engine", line(material, "optim.lr=1e-4"))
    assert loaded.config.optim.lr_scheduler_type == "constant"
    assert loaded.provenance["optim.lr_scheduler_type"] == "verl's sft_trainer"


def test_defaults_of_styles_are_verls_published_ones():
    published = translation.defaults(translation.SFT_TABLE)
    old, new = SFT.tables.styles.values()
    for style, place in ((old, 0), (new, -1)):
        for key, value in style.defaults.items():
            known = published[key][place]
            assert (float(known) if key == "optim.lr" else known) == value or (
                key == "optim.lr_scheduler_type" and published["optim.lr_scheduler"] == [value]
            )


def test_which_limit_of_a_pass_has_no_effect(material):
    both = ["data.micro_batch_size_per_gpu=4", "data.max_token_len_per_gpu=99"]
    for more, unused in (((), "max_token_len"), (("data.use_dynamic_bsz=True",), "micro_batch")):
        loaded = compose(overrides=line(material, *both, *more))
        (note,) = loaded.notes
        assert note.kind == "unused" and note.text.startswith(f"data.{unused}")


def test_keys_without_effect(material):
    without = {
        "optim.lr_scheduler_type=constant": "optim.min_lr_ratio=0.2",
        "optim.lr_warmup_steps=5": "optim.lr_warmup_steps_ratio=0.1",
    }
    for reason, unused in without.items():
        loaded = compose(overrides=line(material, reason, unused))
        (note,) = loaded.notes
        assert note.kind == "unused" and note.text.startswith(unused.split("=")[0]), note
        assert compose(overrides=line(material, unused)).notes == []


@pytest.mark.parametrize("command", [PPO, SFT], ids=["main_ppo", "main_sft"])
def test_the_default_configuration_has_the_defaults_of_the_schema(command):
    """`verlite explain` prints the schema's."""
    assigned = from_our_yaml(command.config_name, command)
    assert assigned, "the file sets a value, which says whose file it is"
    for one in assigned:
        for name, value in one.value.items():
            assert command.keys[f"{one.key}.{name}"].default == value


def test_every_new_name_exists():
    sets = [name for _, names in SFT.tables.sets.values() for name in names]
    for name in [*SFT.tables.renamed.values(), *sets, *SFT.tables.null_means]:
        assert name in SFT.leaves
    for name in [*SFT.tables.renamed, *SFT.tables.ignored]:
        assert name not in SFT.keys


def outcomes():
    """Yield the reason or remedy that each of verl's keys meets."""
    for name in SFT.verl_defaults():
        for table in (SFT.tables.fixed, SFT.tables.refused, SFT.tables.ignored):
            found = translation.lookup(table, name)
            if found:
                yield found.why if table is SFT.tables.fixed else found


def test_reasons_name_keys_that_exist():
    tables = SFT.tables
    reasons = {*tables.ignored.values(), *tables.refused.values()}
    reasons |= {fixed.why for fixed in tables.fixed.values()}
    reached = {why for why in reasons if any(why == found for found in outcomes())}
    assert len(reached) > 25
    for reason in reached:
        for word in re.findall(r"\b[a-z_]+(?:\.[a-z_]+)+\b", reason):
            if word.split(".")[0] not in ("metrics", "torch"):
                assert SFT.find(word), f"{word!r} in {reason!r}"


def test_check_and_explain(material, tmp_path):
    pasted = ["torchrun", "--nproc_per_node", "2", "-m", "verl.trainer.fsdp_sft_trainer"]
    chats = tmp_path / "chats.jsonl"
    turns = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    chats.write_text(json.dumps({"chat": turns}) + "\n")
    own = line(material, "fsdp_config.fsdp_size=2", "use_remove_padding=true")
    options = [f"data.train_files={chats}", *own[1:], "data.messages_key=chat"]
    options += ["data.train_batch_size=1"]
    result = CliRunner().invoke(app, ["check", *pasted, *options])
    assert result.exit_code == 0, result.output
    assert result.output.splitlines() == [
        "note: renamed keys: use_remove_padding -> model.use_remove_padding",
        "note: use_remove_padding is a name of verl's fsdp_sft_trainer, so its defaults apply: "
        "optim.betas=[0.9,0.95], optim.lr_warmup_steps_ratio=0.1, optim.min_lr_ratio=0.0. Give a "
        "key to choose otherwise",
        "note: for one process here: fsdp_config.fsdp_size=2: must divide the 1 processes "
        "of this run",
        "train: the first 1 examples have tokens 5 to 5 (median 5, p90 5), limit 1024, of which "
        "1 to 1 (median 1, p90 1) are trained",
        f"note: model.path={material.folder}/model: no small copy of a qwen2 model can be built, "
        "so its architecture is checked with short sequences only. Compare log-probs with those of "
        "transformers on your longest sequences",
        "note: 1 of 1 examples do not end with a special token: the chat template writes none "
        "after the assistant's last turn, or has it outside of its generation marks. A model that "
        "learns them does not learn to end its answers",
        "The configuration is fine. See the notes above.",
    ]
    result = CliRunner().invoke(app, ["check", "main_sft", *options, "data.val_files=gone.parquet"])
    assert result.exit_code == 2
    assert "data.val_files=gone.parquet: does not exist" in result.stderr
    result = CliRunner().invoke(app, ["check", "main_sft", *own, "data.prompt_key=q"])
    assert result.exit_code == 2 and "has no column 'q'" in result.stderr
    result = CliRunner().invoke(app, ["check", *pasted, *options, "data.val_files=gone.parquet"])
    assert result.exit_code == 0
    assert "for one process here: data.val_files=gone.parquet: does not exist" in result.output
    result = CliRunner().invoke(app, ["check", "main_sft", *options, "data.enable_thinking_key=x"])
    assert result.exit_code == 2 and "1 problem in the configuration" in result.stderr
    result = CliRunner().invoke(app, ["check", "main_sft", "--help-me"])
    assert result.exit_code == 2 and "data.train_files" in result.stderr
    result = CliRunner().invoke(app, ["explain", "--sft", "partial_pretrain"])
    assert result.stdout.startswith("model.partial_pretrain is now called model.path\n")
    result = CliRunner().invoke(app, ["explain", "--sft", "data.prompt_dict_keys"])
    assert "For a column of mappings" in result.stdout


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("data.train_batch_size=65", "data.train_batch_size=65 is more than the 64 training rows"),
        ("data.train_max_samples=7", "data.train_batch_size=8 is more than the 7 training rows"),
        (
            "data.max_token_len_per_gpu=5",
            "data.max_token_len_per_gpu=5 has no room for the longest row of data.train_files, "
            "which has 6 tokens. Use at least 6",
        ),
        (
            "data.max_token_len_per_gpu=6",
            "data.max_token_len_per_gpu=6 has no room for the longest row of data.val_files, "
            "which has 7 tokens. Use at least 7",
        ),
        ("data.val_max_samples=1 data.max_token_len_per_gpu=6", None),
        (
            "+model.override_config.vocab_size=3",
            "row 0 of data.train_files: the example has token id",
        ),
    ],
)
def test_check_tries_what_the_run_refuses(material, tmp_path, more, message):
    """With the run's own words."""
    files = []
    for name, rows in (("train", [("1+1=", "2")] * 64), ("val", [("1+1=", "2"), ("1+1=", "20")])):
        lines = [json.dumps({"prompt": a, "response": b}) for a, b in rows]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
        files.append(f"data.{name}_files={tmp_path}/{name}.jsonl")
    options = [*files, *line(material)[1:], "data.train_batch_size=8", *more.split()]
    result = CliRunner().invoke(app, ["check", "main_sft", *options])
    if message is None:
        assert result.exit_code == 0, result.output
        return
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.stderr.split())
    assert main([*options, "trainer.device=cpu"]) == 2


def test_unknown_config_name_lists_sft_files_only(material):
    with pytest.raises(ConfigError) as error:
        compose("sfft")
    (problem,) = error.value.problems
    assert problem.remedy == "Available: sft."


@pytest.mark.parametrize("path", ["/nonexistent", "{folder}"])
def test_invalid_model_path_is_one_message(material, tmp_path, path, capsys):
    path = path.replace("{folder}", str(tmp_path))
    file = write_prompts(tmp_path / "train.parquet", 2, response="2")
    options = [f"data.train_files={file}", "data.train_batch_size=1", f"model.path={path}"]
    try:
        code = main([*options, "trainer.device=cpu", f"trainer.default_local_dir={tmp_path}/run"])
    except SystemExit as stop:  # of a key, before the run begins
        code = stop.code
    assert code == 2
    printed = capsys.readouterr().err
    assert f"model.path={path}" in printed and "Traceback" not in printed
