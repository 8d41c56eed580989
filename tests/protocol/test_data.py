import pickle
import warnings
from typing import NamedTuple

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from verlite.protocol.data import DataProto, DataProtoItem, equal, near_equal_bounds


def batch(rows: int = 5, **meta: object) -> DataProto:
    return DataProto.from_dict(
        {
            "ids": torch.arange(rows * 3).reshape(rows, 3),
            "score": torch.arange(rows, dtype=torch.float32),
        },
        {"uid": [f"u{i}" for i in range(rows)], "turns": [["a", "b"]] * rows},
        meta,
    )


def rows_of(data: DataProto) -> list[int]:
    """Return the original row numbers. They must be the same in tensors and objects."""
    numbers = [int(first) // 3 for first in data.batch["ids"][:, 0]]
    assert [f"u{n}" for n in numbers] == data.non_tensor_batch["uid"].tolist()
    assert [float(n) for n in numbers] == data.batch["score"].tolist()
    return numbers


def test_equally_long_lists_stay_objects():
    assert batch().non_tensor_batch["turns"].shape == (5,)
    assert type(DataProto.from_dict(None, {"n": np.arange(3)}).non_tensor_batch["n"][0]) is int


@pytest.mark.parametrize(
    "rows, expected",
    [
        (slice(1, 4), [1, 2, 3]),
        (slice(None, None, -2), [4, 2, 0]),
        (slice(3, 3), []),
        ([4, 0, 0, -2], [4, 0, 0, 3]),
        ([], []),
        (np.array([2, 1]), [2, 1]),
        (torch.tensor([2, 1]), [2, 1]),
        ([True, False, False, True, False], [0, 3]),
        (np.array([False] * 5), []),
    ],
)
def test_selection_is_the_same_in_tensors_and_objects(rows, expected):
    assert rows_of(batch()[rows]) == expected


@pytest.mark.parametrize("rows", [[5], [-6], [0.0, 1.0], [True, False], [[0, 1]]])
def test_wrong_row_numbers_are_errors(rows):
    with pytest.raises((IndexError, ValueError)):
        batch()[rows]


def test_operations_do_not_modify_the_batch():
    data = batch(step=1)
    before = pickle.dumps(data)
    data.with_batch(new=torch.zeros(5))
    data.with_non_tensor(x=range(5))
    data.with_meta(step=2)
    data.pop(["ids"], ["uid"], ["step"])
    data.union(batch(5, other=2))
    data.repeat(2)
    data.select(["ids"])
    data.rename("ids", "tokens")
    data.to("cpu")
    data.to_tensordict()
    assert pickle.dumps(data) == before


def test_repeat_interleaves_or_tiles_rows():
    assert rows_of(batch(3).repeat(2)) == [0, 0, 1, 1, 2, 2]
    assert rows_of(batch(3).repeat(2, interleave=False)) == [0, 1, 2, 0, 1, 2]


@pytest.mark.parametrize("rows, n", [(5, 2), (7, 3), (6, 3), (3, 3)])
def test_bounds_cover_all_rows_in_near_equal_sizes(rows, n):
    parts = [batch(rows)[start:stop] for start, stop in near_equal_bounds(rows, n)]
    sizes = [len(part) for part in parts]
    assert len(parts) == n
    assert max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)
    assert rows_of(DataProto.concat(parts)) == list(range(rows))


def test_one_row_and_iteration():
    item = batch(3, step=1)[-2]
    assert isinstance(item, DataProtoItem)
    assert item.batch["ids"].tolist() == [3, 4, 5] and item.batch["score"].item() == 1
    assert item.non_tensor_batch == {"uid": "u1", "turns": ["a", "b"]}
    assert item.meta_info == {"step": 1}
    assert [row.non_tensor_batch["uid"] for row in batch(3)] == ["u0", "u1", "u2"]
    with pytest.raises(IndexError, match="row 3 does not exist in a batch with 3 rows"):
        batch(3)[3]
    with pytest.raises(IndexError, match="row -4"):
        batch(3)[-4]


def test_slice_split_and_chunk():
    assert rows_of(batch(5).slice(1, 4)) == [1, 2, 3]
    assert rows_of(batch(5).slice(end=-1, step=2)) == [0, 2]
    assert [rows_of(part) for part in batch(5).split(2)] == [[0, 1], [2, 3], [4]]
    with pytest.raises(ValueError, match="split_size=-1"):
        batch(5).split(-1)
    assert [rows_of(part) for part in batch(6).chunk(3)] == [[0, 1], [2, 3], [4, 5]]
    assert [len(part) for part in batch(0).chunk(2)] == [0, 0]
    for chunks in (0, 4):
        with pytest.raises(ValueError, match=f"6 rows cannot be divided into {chunks}"):
            batch(6).chunk(chunks)


def test_repeats_of_each_row():
    assert rows_of(batch(3).repeat(repeat_times=2)) == [0, 0, 1, 1, 2, 2]
    assert rows_of(batch(3).sample_level_repeat([2, 0, 1])) == [0, 0, 2]
    with pytest.raises(ValueError, match=r"\(2,\) numbers of repeats for 3 rows"):
        batch(3).sample_level_repeat([1, 1])


def test_column_chunks():
    data = DataProto.from_dict(
        {"a": torch.arange(8).reshape(2, 4), "b": torch.tensor([[1], [2]])}, {"uid": ["x", "y"]}
    )
    chunks = data.unfold_column_chunks(2, ["a"])
    assert chunks.batch["a"].tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert chunks.batch["b"].tolist() == [[1], [1], [2], [2]]
    assert chunks.non_tensor_batch["uid"].tolist() == ["x", "x", "y", "y"]
    with pytest.raises(ValueError, match="'a' is 4 wide, not a multiple of 3"):
        data.unfold_column_chunks(3, ["a"])


def test_iterator_covers_all_rows_in_each_epoch():
    parts = [rows_of(part) for part in batch(4, step=1).make_iterator(2, 2)]
    assert parts == [[0, 1], [2, 3]] * 2
    shuffled = [
        [
            row
            for part in batch(8).make_iterator(2, 2, seed, {"shuffle": True})
            for row in rows_of(part)
        ]
        for seed in (1, 1, 2)
    ]
    assert shuffled[0] == shuffled[1] != shuffled[2]
    for rows in shuffled:
        assert sorted(rows[:8]) == sorted(rows[8:]) == list(range(8)) and rows[:8] != rows[8:]
    (part,) = batch(2, step=1).make_iterator(2, 1)
    assert part.meta_info == {"step": 1}
    with pytest.raises(ValueError, match="4 rows cannot be divided into mini-batches of 3"):
        batch(4).make_iterator(3, 1)


def test_rename():
    renamed = batch(2).rename(["ids", "score"], ["score", "ids"])
    assert renamed.batch["score"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert renamed.batch["ids"].tolist() == [0, 1]
    assert list(batch(2).rename("ids", "tokens").tensors()) == ["tokens", "score"]
    with pytest.raises(KeyError, match="missing"):
        batch(2).rename("missing", "x")
    with pytest.raises(ValueError, match="1 old names and 2 new ones"):
        batch(2).rename("ids", ["x", "y"])
    with pytest.raises(ValueError, match="1 old names and 2 new ones"):
        batch(2).rename(["ids", "ids"], ["x", "y"])
    with pytest.raises(ValueError, match="a column already"):
        batch(2).rename("ids", "score")


def test_edits_in_place_name_what_to_write():
    with pytest.raises(TypeError, match=r"write data = data\[indices\]"):
        batch().reorder(torch.tensor([1, 0]))
    with pytest.raises(TypeError, match=r"DataProto.concat\(\[data, data\[-1:\]"):
        batch().padding(2)


def test_batches_of_mixed_columns():
    arrays = {"a": torch.arange(2), "uid": np.array(["x", "y"]), "n": np.arange(2)}
    data = DataProto.from_single_dict(arrays, {"step": 1})
    assert data.batch["a"].tolist() == [0, 1] and data.meta_info == {"step": 1}
    assert data.non_tensor_batch["uid"].tolist() == ["x", "y"]
    assert data.non_tensor_batch["n"].tolist() == [0, 1]
    with pytest.raises(ValueError, match="'a' is list, not a tensor"):
        DataProto.from_single_dict({"a": [1, 2]})
    assert len(DataProto(batch=None, non_tensor_batch=data.non_tensor_batch)) == 2
    assert len(DataProto(batch=None)) == 0


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_tensordict_round_trip(rows):
    data = batch(rows, step=1, names=["a", "b"], nested={"x": [1]})
    both = data.to_tensordict()
    assert both.batch_size == torch.Size([rows]) and both["step"] == 1
    again = DataProto.from_tensordict(both)
    assert pickle.dumps(again.union(data)) == pickle.dumps(data)
    assert len(again.union(data).non_tensor_batch) == 2 and again.meta_info == data.meta_info


def test_tensordicts_that_are_not_batches():
    with pytest.raises(ValueError, match=r"\['ids'\] are columns and entries of meta_info"):
        batch(ids=1).to_tensordict()
    inner = TensorDict({"x": torch.zeros(2)}, batch_size=[2])
    with pytest.raises(ValueError, match="'below' is TensorDict, not a tensor"):
        DataProto.from_tensordict(TensorDict({"below": inner}, batch_size=[2]))


def test_print_size(capsys):
    data = DataProto.from_dict({"x": torch.zeros(2, 2**26)}, {"a": [np.zeros(2**27), None]})
    data.print_size("before")
    assert capsys.readouterr().out == "before, 2 rows: tensors 0.500 GiB, objects 1.000 GiB\n"


def test_more_bounds_than_rows_leave_some_empty():
    assert near_equal_bounds(2, 4) == [(0, 1), (1, 2), (2, 2), (2, 2)]


def test_concat_ignores_empty_parts_and_joins_meta_info():
    joined = DataProto.concat(
        [batch(2, step=1), DataProto(meta_info={"other": 2}), batch(5)[5:], batch(1, step=1)]
    )
    assert rows_of(joined) == [0, 1, 0] and joined.meta_info == {"step": 1, "other": 2}


def test_concat_merges_metrics():
    parts = [
        batch(1, metrics={"loss": 1.0, "n": 3}),
        batch(1, metrics=[{"loss": 2.0}, {"loss": 5.0, "n": 4}]),
        DataProto(meta_info={"metrics": None, "step": 1}),
    ]
    joined = DataProto.concat(parts)
    assert joined.meta_info == {"step": 1, "metrics": {"loss": [1.0, 2.0, 5.0], "n": [3, 4]}}


@pytest.mark.parametrize(
    "other, names",
    [
        (lambda d: d.select(["ids"]), "score"),
        (lambda d: d.select(None, ["uid"]), "turns"),
        (lambda d: d.with_batch(ids=torch.zeros(5, 4, dtype=torch.int64)), "ids.*shapes"),
        (lambda d: d.with_batch(score=torch.zeros(5, dtype=torch.float64)), "score.*dtypes"),
        (lambda d: d.with_meta(step=2), "step"),
    ],
)
def test_concat_names_what_differs(other, names):
    with pytest.raises(ValueError, match=names):
        DataProto.concat([batch(5, step=1), other(batch(5, step=1))])


def test_union_needs_equal_values_and_nan_equals_nan():
    scores = torch.tensor([0.0, float("nan"), 2, 3, 4])
    nan = (
        batch()
        .with_batch(score=scores)
        .with_non_tensor(x=[float("nan"), {"a": np.arange(2)}, None, 1, "s"])
    )
    again = pickle.loads(pickle.dumps(nan))
    assert nan.union(again.with_batch(more=torch.ones(5))).batch["more"].sum() == 5
    for different, name in [
        (again.with_batch(score=torch.zeros(5)), "score"),
        (again.with_non_tensor(x=[0.0, {"a": np.arange(2)}, None, 1, "s"]), "x"),
        (again.with_non_tensor(x=[float("nan"), {"a": np.arange(3)}, None, 1, "s"]), "x"),
        (again.with_batch(score=nan.batch["score"].double()), "score"),
    ]:
        with pytest.raises(ValueError, match=f"'{name}'"):
            nan.union(different)
    with pytest.raises(ValueError, match="step"):
        batch(5, step=1).union(batch(5, step=2))
    with pytest.raises(ValueError, match="5 and 4 rows"):
        batch(5).union(DataProto.from_dict({"other": torch.zeros(4)}))


def test_pop_and_select_name_missing_columns():
    popped, rest = batch(5, step=1).pop(["ids"], ["uid"], ["step"])
    assert (
        set(popped.batch.keys()) == {"ids"}
        and set(rest.batch.keys()) == {"score"}
        and len(rest) == 5
    )
    assert (
        set(popped.non_tensor_batch) == {"uid"}
        and popped.meta_info == {"step": 1}
        and rest.meta_info == {}
    )
    data = batch()
    for call in (data.pop, data.select, lambda names: data.select(None, names)):
        with pytest.raises(KeyError, match="nope"):
            call(["nope"])


def test_columns_must_agree_about_the_rows():
    with pytest.raises(ValueError, match="'b'.*2 rows.*3"):
        DataProto.from_dict({"a": torch.zeros(3), "b": torch.zeros(2)})
    with pytest.raises(ValueError, match="uid"):
        DataProto.from_dict({"a": torch.zeros(3)}, {"uid": ["x"]})
    with pytest.raises(ValueError, match="'a'"):
        DataProto.from_dict({"a": torch.tensor(1.0)})
    with pytest.raises(ValueError, match="'a' is both"):
        DataProto.from_dict({"a": torch.zeros(1)}, {"a": ["x"]})


DTYPES = [
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.int64,
    torch.bool,
    torch.float8_e4m3fn,
]


def every_dtype() -> DataProto:
    data = batch(4, step=1, name="x")
    values = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    return data.with_batch(
        **{str(dtype): values.to(dtype) for dtype in DTYPES},
        empty=torch.zeros(4, 0),
        view=values.t()[:4],
    )


def test_pickle_moves_tensors_out_of_band_and_bit_for_bit():
    """All but numbers per row, which cost less as bytes."""
    data, buffers = every_dtype(), []
    payload = pickle.dumps(data, protocol=5, buffer_callback=buffers.append)
    larger = sum(tensor.nbytes for tensor in data.tensors().values() if tensor.ndim > 1)
    assert len(payload) < 3000 and sum(len(buffer.raw()) for buffer in buffers) == larger
    with warnings.catch_warnings():
        warnings.simplefilter(
            "error"
        )  # torch warns of read-only memory, which is what an object store gives
        again = pickle.loads(payload, buffers=[bytes(buffer.raw()) for buffer in buffers])
    assert all(again.batch[str(dtype)].dtype == dtype for dtype in DTYPES)
    as_bits = {"torch.float8_e4m3fn"}
    for name in data.batch.keys():
        mine, theirs = data.batch[name], again.batch[name]
        assert (
            torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))
            if name in as_bits
            else torch.equal(mine, theirs)
        )
    assert (
        again.meta_info == data.meta_info
        and again.non_tensor_batch["uid"].tolist() == data.non_tensor_batch["uid"].tolist()
    )


def test_numbers_per_row_are_pickled_together_and_come_back_bit_for_bit():
    numbers = torch.tensor([3, 2**53 + 1, -1])
    columns = {
        "b": torch.tensor([True, False, True]),
        "z": numbers,
        "x": torch.tensor([0.1, -0.0, float("nan")]),
        "y": torch.tensor([0.1, 1e300, -0.0], dtype=torch.float64),
        "a": torch.arange(12)[::4],
        "matrix": torch.ones(3, 2),
        "w": torch.ones(3, dtype=torch.bfloat16),
        "c": torch.tensor([1.5, 2.5, 3.5], requires_grad=True),
    }
    for chosen in (columns, {}):
        again = pickle.loads(pickle.dumps(DataProto.from_dict(chosen, {"uid": list("pqr")})))
        assert list(again.tensors()) == list(chosen)
        for name, tensor in again.tensors().items():
            assert tensor.dtype == columns[name].dtype and not tensor.requires_grad
            assert equal(tensor, columns[name].detach())
            assert tensor.signbit().equal(columns[name].signbit())


def test_bytes_count_tensors_and_arrays_in_object_columns():
    ragged = [np.zeros(3, np.int32), np.zeros(5, np.float32), "text"]
    assert (
        DataProto.from_dict({"a": torch.zeros(3, 2, dtype=torch.int64)}, {"b": ragged}).nbytes
        == 48 + 12 + 20
    )


def test_pickle_sends_only_the_rows_of_a_view():
    big = DataProto.from_dict({"x": torch.zeros(1000, 100)})
    assert len(pickle.dumps(big[10:12], protocol=5)) < 2000


class Place(NamedTuple):
    """As a reference to a row of a column (controller.columns)."""

    chunk: str
    row: int


class Pair(NamedTuple):
    """Another kind of as many fields."""

    left: int
    right: int


def test_named_tuples_are_pickled_by_field_and_come_back_as_they_were():
    places = [Place("c", i) for i in range(100)]
    mixed = [Place("c", 0), Pair(1, 2), None, (1, 2)] * 25
    two = [Place("c", 0), Pair(1, 2)] * 50
    columns = {"a": places, "mixed": mixed, "two": two, "b": [(1, 2)] * 100}
    data = DataProto.from_dict({}, columns)
    again = pickle.loads(pickle.dumps(data))
    for name in data.non_tensor_batch:
        mine, theirs = data.non_tensor_batch[name], again.non_tensor_batch[name]
        assert mine.tolist() == theirs.tolist() and theirs.dtype == object
        assert list(map(type, mine)) == list(map(type, theirs))
    none = pickle.loads(pickle.dumps(data[:0])).non_tensor_batch
    assert {name: len(column) for name, column in none.items()} == dict.fromkeys(columns, 0)
    only = DataProto.from_dict({}, {"a": places})
    assert len(pickle.dumps(only, protocol=5)) < 1200  # a number for each row, no class


def test_disk_round_trip_without_pickle(tmp_path):
    data = every_dtype().with_non_tensor(
        info=[{"n": np.int64(3), "a": np.arange(2), "t": "é"}, None, 1.5, ["x"]]
    )
    data.save_to_disk(tmp_path / "dump")
    again = DataProto.load_from_disk(tmp_path / "dump")
    assert (
        again.select([n for n in again.batch.keys() if "float8" not in n]).union(
            data.select([], ["uid", "turns"])
        )
        is not None
    )
    assert torch.equal(again.batch["torch.bfloat16"], data.batch["torch.bfloat16"])
    assert again.non_tensor_batch["info"].tolist() == [
        {"n": 3, "a": [0, 1], "t": "é"},
        None,
        1.5,
        ["x"],
    ]
    assert sorted(path.name for path in (tmp_path / "dump").iterdir()) == [
        "rest.json",
        "tensors.safetensors",
    ]


def test_ragged_columns_keep_their_dtype_and_their_rows_on_disk(tmp_path):
    rows = {
        "ids": [np.array([5, 7], np.int32), np.zeros(0, np.int32), np.array([-1], np.int32)],
        "mask": [np.array([1, 0], np.int8), np.zeros(0, np.int8), np.array([1], np.int8)],
        "log_probs": [
            np.array([0.1, np.nan], np.float32),
            np.zeros(0, np.float32),
            np.array([-np.inf], np.float32),
        ],
        "mixed": [np.array([1], np.int32), np.array([2], np.int64), None],
    }
    DataProto.from_dict({"x": torch.ones(3)}, rows).save_to_disk(tmp_path)
    again = DataProto.load_from_disk(tmp_path)
    assert list(again.tensors()) == ["x"]
    assert sorted(again.non_tensor_batch) == sorted(rows)
    for name in ("ids", "mask", "log_probs"):
        for row, expected in zip(again.non_tensor_batch[name], rows[name], strict=True):
            assert row.dtype == expected.dtype
            np.testing.assert_array_equal(row, expected)
    assert again.non_tensor_batch["mixed"].tolist() == [[1], [2], None]
    empty = DataProto.from_dict({}, {"ids": rows["ids"]})[:0]
    empty.save_to_disk(tmp_path)
    assert len(DataProto.load_from_disk(tmp_path)) == 0


def test_values_that_are_not_json_are_named(tmp_path):
    with pytest.raises(TypeError, match="set.*cannot be saved"):
        DataProto.from_dict(None, {"x": [{1, 2}]}).save_to_disk(tmp_path)
