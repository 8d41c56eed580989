import inspect
import re

import pytest
import torch

from verlite.protocol import branches, ragged
from verlite.protocol.data import DataProto
from verlite.protocol.fields import DTYPES, FIELDS, check, check_stage
from verlite.trainer import ppo
from verlite.trainer.stages import advantage, rollout, update


def good(b: int = 2, p: int = 3, r: int = 4) -> DataProto:
    ints = {
        "prompts": p,
        "responses": r,
        "input_ids": p + r,
        "attention_mask": p + r,
        "position_ids": p + r,
        "response_mask": r,
    }
    return DataProto.from_dict(
        {name: torch.zeros(b, width, dtype=torch.int64) for name, width in ints.items()}
        | {"old_log_probs": torch.zeros(b, r), "valid": torch.ones(b, dtype=torch.bool)},
        {"uid": ["a"] * b, "error": [None, "x: y"][:b], "extra_info": [{}] * b},
    )


def test_a_correct_batch_is_returned_unchanged():
    data = good()
    assert check(data) is data and check(good(0)) is not None and check(DataProto()) is not None


@pytest.mark.parametrize(
    "change, message",
    [
        (
            lambda d: d.with_batch(old_logprobs=torch.zeros(2, 4)),
            "old_logprobs: unknown field; did you mean old_log_probs",
        ),
        (
            lambda d: d.with_batch(zzz=torch.zeros(2)),
            "zzz: unknown field; add it to protocol/fields.toml",
        ),
        (
            lambda d: d.with_batch(values=torch.zeros(2, 4).double()),
            "values: dtype must be torch.float32, is torch.float64",
        ),
        (
            lambda d: d.with_batch(advantages=torch.zeros(2, 5)),
            r"advantages \[B R\]: R is 5, but it is 4 in responses",
        ),
        (
            lambda d: d.with_batch(advantages=torch.zeros(2)),
            r"advantages: must be \[B R\], has shape \[2\]",
        ),
        (
            lambda d: d.with_batch(prompts=torch.zeros(2, 9).long()),
            r"S must be P \+ R, but P=9 \(prompts\), R=4 \(responses\), S=7",
        ),
        (lambda d: d.with_batch(index=torch.zeros(2)), "index: must be an object column"),
        (
            lambda d: d.with_non_tensor(values=[1, 2]),
            "values: entries must be ndarray or list or tuple, row 0 is int",
        ),
        (lambda d: d.with_non_tensor(raw_scores=[1, 2]), r"raw_scores: must be a tensor \[B\]"),
        (lambda d: d.with_non_tensor(uid=["a", 7]), "uid: entries must be str, row 1 is int"),
        (
            lambda d: d.with_non_tensor(error=["a", 7]),
            "error: entries must be str or NoneType, row 1 is int",
        ),
    ],
)
def test_each_error_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        check(change(good()))


def test_all_errors_are_reported_at_once():
    with pytest.raises(ValueError) as error:
        check(
            good()
            .with_batch(zzz=torch.zeros(2), values=torch.zeros(2, 9))
            .with_non_tensor(uid=[1, 2])
        )
    assert all(name in str(error.value) for name in ("zzz", "values", "uid"))


def test_every_field_has_writer_and_meaning():
    for name, field in FIELDS.items():
        assert field.writer and field.meaning and field.shape.startswith("B"), name
        assert field.dtype in DTYPES, name


def test_a_stage_may_add_only_its_own_fields():
    before = good()
    after = before.with_batch(values=torch.zeros(2, 4))
    assert check_stage("values", before, after) is after
    with pytest.raises(
        ValueError, match="stage score added the field values, whose writer is values"
    ):
        check_stage("score", before, after)


def test_every_writer_exists():
    """A writer is a stage of the training step, or a module that pads or splits rows."""
    stages = [advantage, rollout, update]
    for name, field in FIELDS.items():
        for writer in field.writer.split(", "):
            known = f"verlite.{writer}" in (ragged.__name__, branches.__name__)
            assert known or any(hasattr(module, writer) for module in stages), name


def test_the_loop_names_fields_of_the_stage():
    """The comments of ppo.py agree with the table."""
    rollout_stages = {"next_prompts", "generate", "score"}
    lines = re.findall(r"batch = (\w+)\(run.*?\)  # (.*)", inspect.getsource(ppo.train))
    assert len(lines) == 8
    for stage, names in lines:
        writers = rollout_stages if stage == "samples" else {stage}
        for name in names.split():
            assert writers & set(FIELDS[name].writer.split(", ")), name
