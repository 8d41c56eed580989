"""Split and join rows, without any worker process."""

import pytest
import torch

from tests.controller.workers import Light
from verlite.controller.dispatch import dispatch_of, join_rows, split_rows
from verlite.protocol.data import DataProto

ASSIGNMENTS = [
    None,
    [[0, 1, 2], [3, 4]],
    [[4, 0], [3, 1, 2]],
    [[], [2, 4, 1, 3, 0]],
    [[3], [], [0, 4], [2, 1]],
]


def batch(assignment: object = None, rows: int = 5) -> DataProto:
    uids = [f"u{i}" for i in range(rows)]
    data = DataProto.from_dict({"x": torch.arange(rows)}, {"uid": uids}, {"step": 7})
    return data if assignment is None else data.with_meta(assignment=assignment)


@pytest.mark.parametrize("assignment", ASSIGNMENTS)
@pytest.mark.parametrize("k", [1, 3])
def test_rows_come_back_in_the_callers_order(assignment, k):
    data = batch(assignment)
    parts = split_rows(data, len(assignment or [0, 0]))
    if assignment is not None:
        assert [part.batch["x"].tolist() for part in parts] == assignment
        filled = [part.batch["x"] for part in parts if len(part)]
        assert len({x.untyped_storage().data_ptr() for x in filled}) == 1, "views of one copy"
    assert all(part.meta_info == {"step": 7} for part in parts)
    joined = join_rows([part.repeat(k) for part in parts], data)
    assert joined.batch["x"].tolist() == [i for i in range(5) for _ in range(k)]
    assert joined.non_tensor_batch["uid"].tolist() == [f"u{i}" for i in range(5) for _ in range(k)]


def test_fewer_rows_than_ranks():
    parts = split_rows(batch(rows=2), 4)
    assert [len(part) for part in parts] == [1, 1, 0, 0]
    assert join_rows(parts, batch(rows=2)).batch["x"].tolist() == [0, 1]


def test_empty_batch():
    empty = batch([[], []], 0)
    assert len(join_rows(split_rows(empty, 2), empty)) == 0


def test_other_results_are_a_list_by_rank():
    assert join_rows([1, {"loss": 2.0}], batch()) == [1, {"loss": 2.0}]
    assert join_rows([batch(), None], batch())[1] is None


@pytest.mark.parametrize(
    "assignment",
    [[[0, 1, 2], [3]], [[0, 1, 2], [3, 4, 4]], [[0, 1, 2, 3, 5], []], [[0, 1, 2, 3, 4]]],
)
def test_assignment_with_missing_or_repeated_rows_is_refused(assignment):
    with pytest.raises(ValueError, match="assignment"):
        split_rows(batch(assignment), 2)


def test_results_with_the_wrong_number_of_rows_are_refused():
    data = batch()
    parts = split_rows(data, 2)
    for results in (
        [parts[0], parts[1][1:]],
        [parts[0].repeat(2), parts[1]],
        [parts[0], parts[1].repeat(2)],
    ):
        with pytest.raises(ValueError, match=r"given \[3, 2\] rows and returned"):
            join_rows(results, data)
    with pytest.raises(ValueError, match=r"given \[1, 0\] rows and returned \[1, 1\]"):
        join_rows([batch(rows=1), batch(rows=1)], batch(rows=1))


def test_only_registered_methods_can_be_called():
    assert [dispatch_of(Light, name) for name in ("spec", "add")] == ["all", "rank_zero"]
    registered = "add, child, die_once, environment, fail, hold_lock, imported, lose, runtime_env"
    for name in ("not_registered", "rank", "nope"):
        with pytest.raises(AttributeError, match=f"Light.{name} cannot be called.*{registered}"):
            dispatch_of(Light, name)
