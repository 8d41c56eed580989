"""main_sft reports each invalid key before it loads anything, and exits with code 2."""

import pytest

from tests.config.conftest import write_prompts
from verlite.config import ConfigError
from verlite.config.sft import compose
from verlite.main_sft import main

WRONG = [
    ("data.train_files=null", "data.train_files", "must name at least one parquet file"),
    ("data.train_files=[]", "data.train_files", "must name at least one parquet file"),
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
        "is not a legal name; Legal: auto, float32, bfloat16.",
    ),
    ("fsdp_config.fsdp_size=2", "fsdp_config.fsdp_size", "must divide the 1 processes"),
    ("trainer.test_freq=0", "trainer.test_freq", "must be >= 1 or -1"),
    ("trainer.seed=-1", "trainer.seed", "must be >= 0"),
    ("trainer.device=cuda", "trainer.device", "shows no GPU"),
    ("model.path=/nonexistent", "model.path", "this folder does not exist; on the hub"),
    (
        "model.tokenizer_path=/nonexistent",
        "model.tokenizer_path",
        "this folder does not exist; on the hub",
    ),
    ("model.path={folder}/train.parquet", "model.path", "is a file, not a model folder"),
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
        compose(overrides=line(material, typed.replace("{folder}", str(material.folder))))
    (problem,) = error.value.problems
    assert problem.key == key
    for part in words.split("; "):
        assert part in str(problem)


def test_valid_command_line(material):
    loaded = compose(overrides=line(material, "trainer.experiment_name=2024_11"))
    assert loaded.config.trainer.experiment_name == "2024_11"


def test_unknown_config_name_lists_sft_files_only(material):
    with pytest.raises(ConfigError) as error:
        compose("sfft")
    (problem,) = error.value.problems
    assert problem.remedy == "Available: sft."


@pytest.mark.parametrize("path", ["/nonexistent", "{folder}"])
def test_invalid_model_path_is_one_message(material, tmp_path, path, capsys):
    path = path.replace("{folder}", str(tmp_path))
    file = write_prompts(tmp_path / "train.parquet", 2)
    assert (
        main(
            [
                f"data.train_files={file}",
                f"model.path={path}",
                f"trainer.default_local_dir={tmp_path}/run",
                "trainer.device=cpu",
            ]
        )
        == 2
    )
    printed = capsys.readouterr().err
    assert f"model.path={path}" in printed and "Traceback" not in printed
