"""The quickstart recipe: its task, its files, and the commands of run.py."""

import random
import re

import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM

from recipes import demo
from recipes.agent import run as agent_run
from recipes.dpo import make as dpo
from recipes.quickstart import make, run
from recipes.search import run as search_run
from tests.config.conftest import NO_WEIGHTS
from tests.sft.rows import read_examples
from verlite.config import sft
from verlite.config.commands import SFT
from verlite.config.load import compose
from verlite.data.dataset import PromptDataset, overlap_note
from verlite.engine.folder import load_tokenizer
from verlite.rewards.exact import compute_score
from verlite.spec.roles import DataSpec, ModelSpec

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("build")
    make.make_data(folder, seed=0)
    make.make_model(folder / "model", seed=0)
    return folder


def test_help_starts_nothing(monkeypatch, capsys):
    def refuse(command, **options):
        raise AssertionError(command)

    monkeypatch.setattr(demo.subprocess, "run", refuse)
    for main in (agent_run.main, run.main, search_run.main):
        with pytest.raises(SystemExit) as stop:
            main(["--help"])
        assert stop.value.code == 0
        assert "key=value" in capsys.readouterr().out
        with pytest.raises(AssertionError, match="make.py"):
            main(["no.such.key=2"])  # main_ppo says what is wrong with it


def test_work_is_the_sum_read_backwards():
    for a in range(10, 100):
        for b in range(10, 100):
            ones, _, tens, hundreds = map(int, make.work(a, b))
            assert 100 * hundreds + 10 * tens + ones == a + b


def test_forgetting_every_carry_is_wrong_where_a_carry_is_needed():
    rng = random.Random(0)
    for a, b in [(12, 34), (47, 48), (55, 61), (99, 99)]:
        needs_carry = a % 10 + b % 10 > 9 or a + b > 99
        assert (make.work(a, b, 1.0, rng) != make.work(a, b)) == needs_carry
    assert make.work(99, 99, 1.0, rng) == "8080"


def test_files_can_be_read_and_held_out_sums_are_separate(built):
    tokenizer = load_tokenizer(ModelSpec(path=str(built / "model")))
    config = compose("quickstart", check=False).config.data
    data = DataSpec(max_prompt_length=config.max_prompt_length)
    train, test = (
        PromptDataset(str(built / f"{split}.parquet"), tokenizer, data, "train")
        for split in ("train", "test")
    )
    assert len(train) + len(test) == 90 * 90 and overlap_note(train, test) is None
    for dataset in (train, test):
        for i in range(0, len(dataset), 100):
            row = dataset.row(i)
            a, b = map(int, re.findall(r"\d+", row.messages[0]["content"]))
            assert row.extra_info["sum"] == a + b
            assert compute_score(row.data_source, make.work(a, b), row.ground_truth) == 1.0
            assert len(tokenizer.encode(row.ground_truth)) < config.max_response_length
    held_out = {test.row(i).messages[0]["content"] for i in range(len(test))}
    demonstrations = pq.read_table(built / "warm_up.parquet").to_pylist()
    assert len(demonstrations) == len(train) and not held_out & {
        row["prompt"] for row in demonstrations
    }
    assert len(
        read_examples(str(built / "warm_up.parquet"), tokenizer, sft.SFTDataConfig(max_length=12))
    ) == len(demonstrations)


def test_model_has_vllms_head_size_and_depends_only_on_the_seed(built, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(built / "model")
    assert model.config.hidden_size // model.config.num_attention_heads == 32
    tokenizer = load_tokenizer(ModelSpec(path=str(built / "model")))
    text = "".join(map(chr, range(32, 127))) + "\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text and len(tokenizer.encode(text)) == len(
        text
    )
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    make.make_model(tmp_path / "again", seed=0)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again").state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in model.state_dict().items())


def test_commands_use_each_others_files(tmp_path, monkeypatch):
    (tmp_path / make.FOLDER / "model").mkdir(parents=True)  # built by the first command
    (tmp_path / make.FOLDER / "model" / "model.safetensors").write_bytes(NO_WEIGHTS)
    (tmp_path / make.FOLDER / "warm_up.parquet").touch()
    monkeypatch.chdir(tmp_path)
    warm_up = compose(overrides=run.WARM_UP[2:], command=SFT).config
    config = compose("quickstart", check=False).config
    assert warm_up.model.path == f"{make.FOLDER}/model"
    assert config.actor_rollout_ref.model.path == f"{warm_up.trainer.default_local_dir}/huggingface"
    assert (
        config.data.train_files == f"{make.FOLDER}/train.parquet"
        and config.data.val_files == f"{make.FOLDER}/test.parquet"
    )


def test_one_random_sample_per_problem_is_shown(tmp_path):
    """Neither the best nor the worst, which would show too much or too little."""
    lines = [
        '{"prompt": "0+1=", "response": "1", "score": 1.0, "chosen": "best"}',
        '{"prompt": "1+1=", "response": "4", "score": 0.0, "chosen": "worst"}',
        '{"prompt": "1+1=", "response": "2", "score": 1.0, "chosen": "random"}',
        '{"prompt": "1+1=", "response": "3", "score": 0.0, "chosen": "random"}',
        '{"prompt": "2+2=", "response": "5", "score": 0.0, "chosen": "all"}',
    ]
    (tmp_path / "step_1.jsonl").write_text("\n".join(lines) + "\n")
    assert run.samples(tmp_path / "step_1.jsonl") == ["1+1=2 ✓", "2+2=5 ✗"]


def test_preferences_have_a_wrong_carry_of_both_kinds():
    assert dpo.with_carry("3030", 1) == "3140"
    assert dpo.with_carry("4090", 1) == "4101"  # the carry goes on
    assert dpo.with_carry("3030", 3) == "3031"
    rows = dpo.preferences([(a, b) for a in range(10, 40) for b in range(10, 100)])
    for row in rows:
        a, b = map(int, row["prompt"].removesuffix("=").split("+"))
        assert row["chosen"] == make.work(a, b) != row["rejected"]
    kinds = {"1" in row["chosen"][1::2] for row in rows}
    assert kinds == {True, False} and len(rows) > 1500
