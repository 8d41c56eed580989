import pickle
import warnings

import numpy as np
import pytest
import torch

from verlite.protocol.data import (
    DataProto,
    near_equal_bounds,
)


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


def test_more_bounds_than_rows_leave_some_empty():
    assert near_equal_bounds(2, 4) == [(0, 1), (1, 2), (2, 2), (2, 2)]


def test_concat_ignores_empty_parts_and_joins_meta_info():
    joined = DataProto.concat(
        [batch(2, step=1), DataProto(meta_info={"other": 2}), batch(5)[5:], batch(1, step=1)]
    )
    assert rows_of(joined) == [0, 1, 0] and joined.meta_info == {"step": 1, "other": 2}


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
    for call in (
        data.pop,
        data.select,
        lambda names: data.select(None, names),
    ):
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
    data, buffers = every_dtype(), []
    payload = pickle.dumps(data, protocol=5, buffer_callback=buffers.append)
    assert len(payload) < 3000 and sum(len(buffer.raw()) for buffer in buffers) == data.nbytes
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


def test_bytes_count_tensors_and_arrays_in_object_columns():
    ragged = [np.zeros(3, np.int32), np.zeros(5, np.float32), "text"]
    assert (
        DataProto.from_dict({"a": torch.zeros(3, 2, dtype=torch.int64)}, {"b": ragged}).nbytes
        == 48 + 12 + 20
    )


def test_pickle_sends_only_the_rows_of_a_view():
    big = DataProto.from_dict({"x": torch.zeros(1000, 100)})
    assert len(pickle.dumps(big[10:12], protocol=5)) < 2000


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


def test_values_that_are_not_json_are_named(tmp_path):
    with pytest.raises(TypeError, match="set.*cannot be saved"):
        DataProto.from_dict(None, {"x": [{1, 2}]}).save_to_disk(tmp_path)
