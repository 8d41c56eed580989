"""The search recipe: its facts, its demonstrations, its search engines, and its commands."""

import asyncio
import json
import re

import pyarrow.parquet as pq
import pytest

from recipes.search import make, run
from tests.config.conftest import NO_WEIGHTS
from tests.sft.rows import read_examples
from verlite.config import make_plan, sft
from verlite.config.commands import SFT
from verlite.config.load import compose
from verlite.data.dataset import PromptDataset
from verlite.engine.folder import load_tokenizer
from verlite.envs.retriever import RetrieverClient
from verlite.envs.search import SearchEnv
from verlite.rewards.routing import scorer_of
from verlite.spec.roles import ModelSpec, RetrieverSpec

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("build")
    make.make_data(folder, seed=0)
    make.make_model(folder / "model", seed=0)
    return folder


def passages(file):
    return [json.loads(line)["contents"] for line in file.read_text().splitlines()]


def test_corpus_has_every_fact_and_demonstrations_no_held_out_name(built):
    corpus = passages(built / "corpus.jsonl")
    rows = {
        split: pq.read_table(built / f"{split}.parquet").to_pylist() for split in ("train", "test")
    }
    names = {split: {row["extra_info"]["name"] for row in rows[split]} for split in rows}
    assert (
        len(names["test"]) == make.HELD_OUT
        and not names["train"] & names["test"]
        and len(corpus) == len(set(corpus)) == 1200
    )
    for row in rows["train"] + rows["test"]:
        (answer,) = row["reward_model"]["ground_truth"]["target"]
        assert make.passage(row["extra_info"]["name"], row["extra_info"]["kind"], answer) in corpus
        assert row["prompt"][0]["content"] == make.question(
            row["extra_info"]["name"], row["extra_info"]["kind"]
        )
    demonstrations = pq.read_table(built / "warm_up.parquet").to_pylist()
    demonstration_text = json.dumps(demonstrations)
    assert not [name for name in names["test"] if name in demonstration_text]
    values = [row["reward_model"]["ground_truth"]["target"][0] for row in rows["test"]]
    assert max(values.count(value) for value in values) < 0.1 * len(values), (
        "guessing one answer must not pay"
    )
    assert scorer_of(rows["test"][0]["data_source"]) == "verlite.rewards.qa:compute_score"


def test_demonstrations_have_the_format_of_the_environment(built):
    rows = pq.read_table(built / "warm_up.parquet").to_pylist()
    observed = [
        found
        for row in rows
        for found in re.findall(r"</search>(.*?)<answer>", row["response"], re.DOTALL)
    ]
    assert 0.25 < len(observed) / len(rows) < 0.45
    shape = re.compile(
        r'\n\n<information>Doc 1\(Title: "(\w+)"\) The \w+ of \1 is \w+\.\n'
        r'Doc 2\(Title: "\1"\) .*\.</information>\n\n'
    )
    assert all(shape.fullmatch(text) for text in observed)
    tokenizer = load_tokenizer(ModelSpec(path=str(built / "model")))
    assert len(
        read_examples(str(built / "warm_up.parquet"), tokenizer, sft.SFTDataConfig(max_length=64))
    ) == len(rows)
    for row in rows[:50]:  # tags are single tokens, so a random model can write them
        ids = tokenizer.encode(row["response"], add_special_tokens=False)
        assert tokenizer.decode(ids) == row["response"]
        assert sum(i in map(tokenizer.convert_tokens_to_ids, make.TAGS) for i in ids) == len(
            re.findall(r"</?\w+>", row["response"])
        )


def test_search_engine_finds_facts_and_empty_corpus_finds_nothing(built, monkeypatch):
    async def ask(url, name, kind):
        client = RetrieverClient(RetrieverSpec(url=(url,), topk=make.PASSAGES))
        async with client:
            return await SearchEnv(client).step(f"<search>{kind} of {name}</search>", last=False)

    rows = pq.read_table(built / "test.parquet").to_pylist()[:20]
    with run.search_engine(str(built / "corpus.jsonl")) as url:
        for row in rows:
            step = asyncio.run(ask(url, row["extra_info"]["name"], row["extra_info"]["kind"]))
            (answer,) = row["reward_model"]["ground_truth"]["target"]
            assert (
                f"The {row['extra_info']['kind']} of {row['extra_info']['name']} is {answer}."
                in step.obs
            )
    with run.search_engine(str(built / "nothing.jsonl")) as url:
        assert asyncio.run(ask(url, "Suttev", "tree")).obs == "No results found."


def test_commands_use_each_others_files(built, tmp_path, monkeypatch):
    (tmp_path / make.FOLDER / "model").mkdir(parents=True)  # built by the first command
    (tmp_path / make.FOLDER / "model" / "model.safetensors").write_bytes(NO_WEIGHTS)
    (tmp_path / make.FOLDER / "warm_up.parquet").touch()
    monkeypatch.chdir(tmp_path)
    assert (
        compose(overrides=run.WARM_UP[2:], command=SFT).config.model.path == f"{make.FOLDER}/model"
    )
    config = compose("search_demo", check=False).config
    assert (
        config.actor_rollout_ref.model.path == f"{make.FOLDER}/warm_up/huggingface"
        and config.data.val_files == f"{make.FOLDER}/test.parquet"
    )
    assert config.retriever.topk == make.PASSAGES
    plan = make_plan(config, count_rows=False)
    assert plan.max_turns == 2 and "but" not in plan.turns, "the longest sample fits"
    tokenizer = load_tokenizer(ModelSpec(path=str(built / "model")))
    data = PromptDataset(
        str(built / "train.parquet"),
        tokenizer,
        config.data,
        "train",
        ("data.max_start_length", plan.longest_prompt),
    )
    assert max(len(data.prompt_ids(i)) for i in range(len(data))) <= plan.longest_prompt
