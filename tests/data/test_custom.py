"""Rows and orders of the user's own: the example of docs/data.md, exact resume, and errors."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.models import tiny_tokenizer
from verlite.config.compile import data_spec
from verlite.config.schema import Config, CustomClsConfig, DataConfig, SamplerConfig
from verlite.data.dataset import DataError, PromptDataset, RowFiles
from verlite.data.sampler import PromptSampler, own_order

PAGE = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
SUMS = ["7+5", "12+30", "4+4", "100+1", "10+9"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with the files of the page."""
    monkeypatch.chdir(tmp_path)
    for name, code in re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE, re.DOTALL):
        Path(name).write_text(code)
    Path("sums.txt").write_text("\n".join(SUMS))
    return tmp_path


def settings(order: str | None = "EasyFirst", rows: str = "Lines", **more: Any) -> DataConfig:
    return DataConfig(
        custom_cls=CustomClsConfig("my_data.py", rows),
        sampler=SamplerConfig("my_order.py" if order else None, order),
        **more,
    )


def dataset(config: DataConfig, first: int | None = None) -> PromptDataset:
    files = RowFiles("sums.txt", data_spec(Config(data=config)), "train", first)
    return PromptDataset(files, tiny_tokenizer(), data_spec(Config(data=config)), "train")


def sampler(config: DataConfig, batch: int = 2) -> PromptSampler:
    data = dataset(config)
    order = own_order(data_spec(Config(data=config)), data)
    assert order is not None
    return PromptSampler(len(order(0)), batch, config.seed, config.shuffle, order=order)


def test_rows_of_the_page() -> None:
    data = dataset(settings())
    assert [data.row(i).ground_truth for i in range(5)] == ["12", "42", "8", "101", "19"]
    assert data.row(1).messages == [{"role": "user", "content": "12+30="}]
    assert data.row(1).prompt_ids == tiny_tokenizer().encode("12+30=")
    assert data.where(3) == "Lines (sums.txt) row 3"
    report = str(dataset(settings(), first=2).report)
    assert report.startswith("train: 2 prompts from Lines (sums.txt); tried on the first 2 of 5")


def test_order_of_the_page() -> None:
    """Short sums first, then shuffled, each row once an epoch."""
    drawn = sampler(settings(), batch=5)
    assert drawn.next_batch() == [0, 2, 4, 1, 3]
    second, third = drawn.next_batch(), drawn.next_batch()
    assert sorted(second) == sorted(third) == [0, 1, 2, 3, 4] and second != third


def test_resume_goes_on_in_the_users_order() -> None:
    whole = sampler(settings())
    batches = [whole.next_batch() for _ in range(9)]
    for stop in range(1, 9):
        before = sampler(settings())
        for _ in range(stop):
            before.next_batch()
        after = sampler(settings())
        after.load_state_dict(before.state_dict())
        assert [after.next_batch() for _ in range(9 - stop)] == batches[stop:]


def test_another_order_is_not_resumed() -> None:
    before = sampler(settings())
    before.next_batch()
    text = Path("my_order.py").read_text()
    Path("my_order.py").write_text(text.replace("self.digits[row])", "-self.digits[row])"))
    with pytest.raises(ValueError, match=r"data.sampler: order\(0\) is another one than before"):
        sampler(settings()).load_state_dict(before.state_dict())


def test_rows_may_be_left_out_and_repeated() -> None:
    Path("my_order.py").write_text(
        "class Hard:\n    def __init__(self, **given): ...\n"
        "    def order(self, epoch): return [4, 3, 1, 1]\n"
    )
    drawn = sampler(settings("Hard"))
    assert drawn.steps_per_epoch == 2
    assert [drawn.next_batch() for _ in range(3)] == [[4, 3], [1, 1], [4, 3]]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("raise OSError('no disk')", "failed: OSError: no disk ("),
        ("raise SystemExit(0)", "failed: SystemExit: 0 ("),
        ("return [0, 5]", "must be a list of row numbers from 0 to 4, not [0 5]"),
        ("return [-1]", "from 0 to 4, not [-1]"),
        ("return [0.5]", "from 0 to 4, not [0.5]"),
        ("return []", "from 0 to 4, not []"),
        ("return None", "from 0 to 4, not None"),
    ],
)
def test_wrong_orders(body: str, words: str) -> None:
    Path("my_order.py").write_text(
        f"class Own:\n    def __init__(self, **given): ...\n    def order(self, epoch): {body}\n"
    )
    with pytest.raises(DataError) as caught:
        sampler(settings("Own"))
    assert str(caught.value).startswith("data.sampler.class_name=Own in my_order.py: order(0) ")
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (
            "class Own:\n    def __init__(self, data): ...",
            "must take data_source, data_config (docs",
        ),
        (
            "class Own:\n    def __init__(self, **given): ...",
            "has neither a method order(epoch) nor __iter__ (docs",
        ),
        ("class Own:\n    def __init__(self, **given): 1 / 0", "be created: ZeroDivisionError"),
        ("class Own:\n    def __init__(self, **given): exit()", "be created: SystemExit: None"),
    ],
)
def test_wrong_samplers(source: str, words: str) -> None:
    Path("my_order.py").write_text(source)
    with pytest.raises(DataError, match=re.escape(words)):
        sampler(settings("Own"))


def test_an_epoch_of_another_length() -> None:
    Path("my_order.py").write_text(
        "class Own:\n    def __init__(self, **given): ...\n"
        "    def order(self, epoch): return [0, 1, 2][epoch:]\n"
    )
    drawn = sampler(settings("Own"), batch=3)
    drawn.next_batch()
    with pytest.raises(DataError, match=r"order\(1\) has 2 rows, and order\(0\) has 3"):
        drawn.next_batch()


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("import nowhere", "my_data.py cannot be loaded: ModuleNotFoundError: No module named"),
        ("def Lines(data_files): ...", "my_data.py: Lines must take data_files, config, split"),
        ("def Lines(**given): return iter([1])", "TypeError: object of type 'list_iterator' has"),
        ("def Lines(**given): return [{}]", "train row 0 has no 'prompt'; it has nothing"),
        (
            "def Lines(**given): return [1]",
            "data.custom_cls.name=Lines: train row 0 is 1, expected a mapping of columns",
        ),
        ("def Lines(**given): return ['prompt']", "train row 0 is 'prompt', expected a mapping"),
        ("def Lines(**given): return []", "data.custom_cls.name=Lines has no rows for train"),
        (
            "class Lines(list):\n    def __init__(self, **given): super().__init__([1, 2])\n"
            "    def __getitem__(self, i): return {}[i]",
            "train row 0 failed: KeyError: 0 (",
        ),
        (
            "class Lines(list):\n    def __init__(self, **given): super().__init__([1, 2])\n"
            "    def __getitem__(self, i): raise SystemExit(0)",
            "train row 0 failed: SystemExit: 0 (",
        ),
        ("def Lines(**given): raise SystemExit(0)", "cannot be created for train: SystemExit: 0 ("),
    ],
)
def test_wrong_rows(source: str, words: str) -> None:
    Path("my_data.py").write_text(source)
    with pytest.raises(DataError, match=re.escape(words)):
        dataset(settings(None))


def test_an_optional_column_that_the_first_row_lacks() -> None:
    text = Path("my_data.py").read_text() + (
        "\n\nclass Later(Lines):\n    def __getitem__(self, i):\n"
        "        row = dict(super().__getitem__(i))\n"
        "        row.pop('extra_info', None)\n"
        "        return row | ({'extra_info': {'i': i}, 'ability': 'sums'} if i == 2 else {})\n"
    )
    Path("my_data.py").write_text(text)
    data = dataset(settings(None, rows="Later"))
    assert [data.row(i).extra_info for i in range(3)] == [{}, {}, {"i": 2}]
    assert [data.row(i).ability for i in range(3)] == [None, None, "sums"]


def test_a_wrong_row_is_named() -> None:
    text = Path("my_data.py").read_text()
    Path("my_data.py").write_text(text.replace('f"{self.lines[i]}="', "i"))
    with pytest.raises(DataError, match=r"Lines \(sums.txt\) row 0: column 'prompt' has the mess"):
        dataset(settings())
