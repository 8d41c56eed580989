"""What `verlite plan` prints, whole, for one small run."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.sizing.conftest import config_folder
from verlite.cli import app

PAGE = Path(__file__).parent / "plan.txt"


def printed(tmp_path: Path, *arguments: str) -> str:
    """Return the output, with this test's folders under fixed names."""
    config_folder(tmp_path / "model", "tiny", num_hidden_layers=2)  # fewer are quicker to measure
    line = [
        f"actor_rollout_ref.model.path={tmp_path}/model",
        "data.train_files=/cluster/train.parquet",
        "data.train_batch_size=64",
        "data.max_prompt_length=256",
        "data.max_response_length=256",
        "actor_rollout_ref.actor.ppo_mini_batch_size=32",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
        "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
        "trainer.n_gpus_per_node=4",
        "trainer.nnodes=2",
        *arguments,
    ]
    environment = {"XDG_CACHE_HOME": f"{tmp_path}/cache"}
    result = CliRunner().invoke(app, ["plan", "--devices", "4x24GB", *line], env=environment)
    assert result.exit_code == 0, result.output
    return result.output.replace(str(tmp_path), "TMP")


def steady(text: str) -> str:
    """Return the text without seconds and without the padding of tables, which follows paths."""
    text = re.sub(r"; \d+ s$", "; N s", text, flags=re.MULTILINE)
    text = re.sub(r"[─━┳┻╇┴┬]+", "-", text)
    return re.sub(r" +", " ", text)


@pytest.mark.slow
def test_a_small_plan_as_a_whole(tmp_path):
    """To update the page: delete plan.txt, run this test twice, and read what changed."""
    text = steady(printed(tmp_path))
    if not PAGE.exists():
        PAGE.write_text(text, encoding="utf-8")
    assert text == PAGE.read_text(encoding="utf-8")
    assert "0 read from the cache" in text
    again = steady(printed(tmp_path))
    assert "0 engines measured" in again
    without_last = [one.rsplit("\n", 2)[0] for one in (text, again)]
    assert without_last[0] == without_last[1]
