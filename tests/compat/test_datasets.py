"""Data sets and samplers written for verl."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.models import tiny_tokenizer
from verlite.config import ConfigError
from verlite.config.compile import data_spec
from verlite.config.load import compose
from verlite.config.schema import Config, CustomClsConfig, DataConfig, SamplerConfig
from verlite.data.dataset import DataError, PromptDataset, RowFiles
from verlite.data.sampler import PromptSampler, own_order

CODE = '''
from collections import Counter

import numpy as np
import torch
from torch.utils.data import Dataset

from verl.experimental.dataset.sampler import AbstractCurriculumSampler, AbstractSampler
from verl.utils.dataset.rl_dataset import RLHFDataset, collate_fn


class Hinted(RLHFDataset):
    """Reads rows by itself, in the style of data sets that override one method."""

    def __init__(self, data_files, tokenizer, config, processor=None, max_samples=-1):
        super().__init__(data_files, tokenizer, config, processor, max_samples)
        self.limit = config.get("max_prompt_length", 7) + config.get("no_such_key", 1)

    def _build_messages(self, example):
        return [{**m, "content": m["content"] + "?"} for m in super()._build_messages(example)]


class Filtered(RLHFDataset):
    def _read_files_and_tokenize(self):
        super()._read_files_and_tokenize()
        self.dataframe = self.dataframe.filter(lambda row: row["extra_info"]["index"] % 2 == 0)
        self.dataframe = self.dataframe.map(lambda row: {"ability": "sums"})

    def __getitem__(self, item):
        row = super().__getitem__(item)
        assert collate_fn([row, row])["input_ids"].shape == (2, self.max_prompt_length)
        return row


class Passed(RLHFDataset):
    """Passes its arguments on without naming them, and gives the rows of the file."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.processes = self.num_workers

    def __getitem__(self, item):
        row = self.dataframe[item]
        row["fake_ids"] = torch.ones(1, dtype=torch.int)
        return row


class Chosen(RLHFDataset):
    """Reads settings of its own."""

    def _read_files_and_tokenize(self):
        super()._read_files_and_tokenize()
        self.dataframe = self.dataframe.filter(
            lambda row, least: row["extra_info"]["index"] >= least,
            fn_kwargs={"least": self.config.get("least", 0)},
            num_proc=self.num_workers,
        )

    def _build_messages(self, example):
        text = self.config.hint.text + example["prompt"][0]["content"]
        return [{"role": "user", "content": text}]


class Plain(Dataset):
    """Makes tensors and messages, without a column `prompt`."""

    def __init__(self, data_files, tokenizer, config, **kwargs):
        self.texts = ["1+1=", "2+2="]

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, i):
        return {
            "raw_prompt": [{"role": "user", "content": self.texts[i]}],
            "data_source": "sums",
            "reward_model": {"style": "rule", "ground_truth": "2"},
            "unused": torch.zeros(1),
        }


class Prefixed(RLHFDataset):
    """Changes the messages of a finished row, which has no token ids in verl's newest version."""

    def __getitem__(self, item):
        row = super().__getitem__(item)
        row["raw_prompt"] = [{"role": "user", "content": "now "}, *row["raw_prompt"]]
        return row


class OtherTokens(RLHFDataset):
    def __getitem__(self, item):
        row = super().__getitem__(item)
        row["raw_prompt_ids"] = row["raw_prompt_ids"] + [9]
        return row


class Shuffled(AbstractSampler):
    """Continues its random numbers from epoch to epoch."""

    def __init__(self, data_source, data_config):
        self.random = np.random.default_rng(data_config.get("seed", 1))
        self.labels = data_source.dataframe["data_source"]
        self.easy = [len(data_source[i]["raw_prompt"]) for i in range(len(data_source))]

    def __iter__(self):
        yield from self.random.permutation(len(self.labels)).tolist()


class Curriculum(AbstractCurriculumSampler):
    def __init__(self, data_source, data_config): ...

    def __iter__(self):
        return iter(())

    def update(self, batch): ...
'''


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compat: None) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(CODE)
    rows = [
        {
            "data_source": "sums",
            "prompt": [{"role": "user", "content": f"{i}+{i}="}],
            "reward_model": {"style": "rule", "ground_truth": str(2 * i)},
            "extra_info": {"index": i},
        }
        for i in range(5)
    ]
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path


def dataset(name: str | None, sampler: str | None = None, **more: Any) -> PromptDataset:
    config = data_spec(Config(data=settings(name, sampler, **more)))
    files = RowFiles("rows.jsonl", config, "train", None, templated)
    return PromptDataset(files, templated(), config, "train")


def templated() -> Any:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    return tokenizer


def settings(name: str | None, sampler: str | None = None, **more: Any) -> DataConfig:
    return DataConfig(
        custom_cls=CustomClsConfig("own.py" if name else None, name),
        sampler=SamplerConfig("own.py" if sampler else None, sampler),
        max_prompt_length=16,
        **more,
    )


def texts(data: PromptDataset) -> list[str]:
    return [tiny_tokenizer().decode(data.prompt_ids(i)) for i in range(len(data))]


def test_a_subclass_that_changes_messages() -> None:
    data = dataset("Hinted")
    assert texts(data) == [f"{i}+{i}=?" for i in range(5)]
    assert data.row(3).ground_truth == "6" and data.row(3).extra_info["index"] == 3


def test_a_subclass_that_changes_the_messages_of_a_finished_row() -> None:
    assert texts(dataset("Prefixed")) == [f"now {i}+{i}=" for i in range(5)]


def test_a_subclass_that_filters_and_maps() -> None:
    data = dataset("Filtered")
    assert texts(data) == ["0+0=", "2+2=", "4+4="]
    assert data.row(1).ability == "sums"


def test_a_subclass_that_passes_its_arguments_on() -> None:
    assert texts(dataset("Passed")) == [f"{i}+{i}=" for i in range(5)]


def test_settings_of_a_dataset_reach_its_config() -> None:
    data = dataset("Chosen", extra={"least": 3, "hint": {"text": "?"}})
    assert texts(data) == ["?3+3=", "?4+4="]


def test_added_keys_are_settings_of_the_dataset() -> None:
    own = ["data.custom_cls.path=own.py", "data.custom_cls.name=Chosen"]
    given = ["+data.least=3", "++data.hint.text=?", "+data.hint.size=2", *own]
    base = ["actor_rollout_ref.model.path=m", "data.train_files=rows.jsonl"]
    loaded = compose(None, [*base, *given], check=False)
    assert loaded.config.data.extra == {"least": 3, "hint": {"text": "?", "size": 2}}
    remark = "data.least is a setting of your own data set or sampler: data.extra.least"
    assert remark in map(str, loaded.notes)
    for wrong in ([*base, "+data.least=3"], [*base, *own, "data.least=3"]):
        with pytest.raises(ConfigError, match="data.least=3: unknown key"):
            compose(None, wrong, check=False)


def test_a_dataset_with_messages_only() -> None:
    assert texts(dataset("Plain")) == ["1+1=", "2+2="]


def test_tokens_that_are_not_those_of_the_messages() -> None:
    with pytest.raises(DataError, match=r"raw_prompt_ids \(5 tokens\) are not .*\(4 tokens\)"):
        dataset("OtherTokens")


def test_fields_of_a_row() -> None:
    from verlite.compat.datasets import RLHFDataset
    from verlite.data.custom import verl_config

    config = verl_config(data_spec(Config(data=settings(None))))
    row = RLHFDataset(["rows.jsonl"], templated(), config, max_samples=2)[1]
    ids = templated().encode("1+1=")
    assert row["raw_prompt_ids"] == ids
    assert row["input_ids"].tolist() == [0] * 12 + ids
    assert row["attention_mask"].tolist() == [0] * 12 + [1] * 4
    assert row["position_ids"].tolist() == [0] * 12 + [0, 1, 2, 3]
    assert (row["index"], row["tools_kwargs"], row["interaction_kwargs"]) == (1, {}, {})


def test_a_sampler_gives_the_same_order_after_a_resume() -> None:
    def drawn() -> PromptSampler:
        data = dataset(None, "Shuffled")
        order = own_order(data_spec(Config(data=settings(None, "Shuffled", seed=7))), data)
        assert order is not None
        return PromptSampler(len(order(0)), 5, order=order)

    one = drawn()
    batches = [one.next_batch() for _ in range(2)]
    state = one.state_dict()
    batches += [one.next_batch() for _ in range(2)]
    assert len({tuple(batch) for batch in batches}) == 4
    assert all(sorted(batch) == [0, 1, 2, 3, 4] for batch in batches)
    two = drawn()
    two.load_state_dict(state)
    assert [two.next_batch() for _ in range(2)] == batches[2:]


def test_a_curriculum_sampler_is_refused() -> None:
    data = dataset(None, "Curriculum")
    with pytest.raises(DataError, match=r"update.*order\(epoch\)"):
        own_order(data_spec(Config(data=settings(None, "Curriculum"))), data)
