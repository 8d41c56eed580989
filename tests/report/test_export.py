"""`verlite export`: find the checkpoint in a run directory, and reject other paths."""

import json
import os
import shutil

import pytest
from typer.testing import CliRunner

from tests.models import tiny_model
from tests.trainer.runs import driver_state
from verlite.cli import app
from verlite.engine.fsdp import TrainEngine
from verlite.engine.process_group import single_process_group
from verlite.spec.roles import FSDPSpec, ModelSpec
from verlite.trainer import checkpoints

pytestmark = pytest.mark.process


def export(*arguments, model="unused"):
    options = ["--model", str(model)] if model else []
    result = CliRunner().invoke(app, ["export", *map(str, arguments), *options])
    return result.exit_code, result.output.replace("\n", " ")


def write_checkpoint(run_dir, step, model, **recorded):
    def save(folder):
        with single_process_group():
            TrainEngine(ModelSpec(path=model), FSDPSpec(), device="cpu").save(folder / "actor")

    run_dir.mkdir(exist_ok=True)
    state = driver_state(step, model={"path": model, **recorded})
    return checkpoints.write(run_dir, step, state, save).path


def test_a_hostile_checkpoint_runs_no_code(tmp_path):
    """The checkpoint names a model that brings code, and says that the code is trusted."""
    model = tiny_model(tmp_path / "model")
    mark = tmp_path / "mark"
    hostile = shutil.copytree(model, tmp_path / "hostile")
    (hostile / "x.py").write_text(f"open({str(mark)!r}, 'w')\nraise ImportError\n")
    config = json.loads((hostile / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "x.C", "AutoModelForCausalLM": "x.M"}
    (hostile / "config.json").write_text(json.dumps(config | {"model_type": "other"}))
    run_dir = tmp_path / "run"
    recorded = {"path": str(hostile), "trust_remote_code": True}
    write_checkpoint(run_dir, 1, str(model), **recorded)

    code, text = export(run_dir, tmp_path / "out", model=None)
    assert code == 2 and f"Name the model. The checkpoint says: --model {hostile}" in text
    code, text = export(run_dir, tmp_path / "out", model=model)
    assert code == 0, text
    code, text = export(run_dir, tmp_path / "other", model=hostile)
    assert code == 2, text
    assert not mark.exists()
    export(run_dir, tmp_path / "other", "--trust-remote-code", model=hostile)
    assert mark.exists(), "the user trusts the code, so it runs"


@pytest.mark.parametrize(
    ("recorded", "message"),
    [
        ({"override_config": {"_attn_implementation": "evil/kernel"}}, "chooses code"),
        ({"override_config": {"text_config": {"auto_map": {}}}}, "auto_map chooses code"),
        ({"override_config": {"a": [{"attn_implementation": "x"}]}}, "chooses code"),
        ({"override_config": {"auto_map": {}}}, "chooses code"),
        ({"override_config": "x"}, "model.override_config has a wrong type"),
        ({"lora_rank": "8"}, "model.lora_rank has a wrong type"),
    ],
)
def test_settings_in_a_checkpoint_choose_no_code(tmp_path, recorded, message):
    state = driver_state(1, model=recorded)
    checkpoints.write(tmp_path, 1, state, lambda folder: None)
    code, text = export(tmp_path, tmp_path / "out")
    assert code == 2 and message in text


def test_export_of_run_dir_uses_newest_complete_checkpoint(tmp_path):
    model = str(tiny_model(tmp_path / "model"))
    run_dir = tmp_path / "run"
    complete = write_checkpoint(run_dir, 2, model)
    damaged = run_dir / "global_step_10"
    damaged.mkdir()
    unfinished = run_dir / ".tmp_global_step_12"
    unfinished.mkdir()
    code, text = export(run_dir, tmp_path / "out", model=model)
    assert code == 0, text
    assert f"ignored incomplete checkpoint {damaged}: no manifest" in text
    assert f"wrote {complete} to {tmp_path / 'out'} in float32" in text
    assert float(text.split()[-1]) < 1e-5
    assert (tmp_path / "out" / "model.safetensors").exists()
    assert unfinished.is_dir(), "a running run may still write it"
    code, text = export(damaged, tmp_path / "other")
    assert code == 2 and "global_step_10 cannot be exported: no manifest" in text
    code, text = export(run_dir, tmp_path / "out")
    assert code == 2 and "out is not empty. Choose a new or empty folder" in text
    code, text = export(run_dir, tmp_path / "other", "--dtype", "int8")
    assert code == 2 and "--dtype=int8 must be one of float32, bfloat16, float16" in text
    (complete / "manifest.json").unlink()
    code, text = export(run_dir, tmp_path / "other")
    assert (
        code == 2 and f"has no complete checkpoint: ignored incomplete checkpoint {run_dir}" in text
    )
    assert "global_step_10: no manifest" in text
    assert "global_step_2: no manifest" in text


def test_paths_that_are_not_utf_8_are_refused(tmp_path):
    checkpoints.write(tmp_path, 1, driver_state(1), lambda folder: None)
    code, text = export(tmp_path, os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))
    assert code == 2 and "\\udcff: the path is not UTF-8 text" in text


@pytest.mark.parametrize(
    ("name", "file", "message"),
    [
        ("gone", None, "gone does not exist. Give a run directory or a global_step_N folder."),
        ("run/metrics.jsonl", "run/metrics.jsonl", "metrics.jsonl is a file."),
        ("run", "run/metrics.jsonl", "is a run directory without checkpoints"),
        ("model", "model/config.json", "is already a Hugging Face model folder."),
        ("other", "other/notes.txt", "contains no global_step_N folder."),
    ],
)
def test_export_explains_unsuitable_paths(tmp_path, name, file, message):
    if file:
        (tmp_path / file).parent.mkdir()
        (tmp_path / file).touch()
    code, text = export(tmp_path / name, tmp_path / "out")
    assert code == 2 and message in text
