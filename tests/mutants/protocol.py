"""Mutants of verlite.protocol: rows that get mixed up."""

from tests.mutants import Mutant
from tests.mutants.patches import calls, does_nothing, result

DATA = "verlite.protocol.data:DataProto."
RAGGED = "verlite.protocol.ragged:"
FIELDS = "verlite.protocol.fields:"
BATCH = "tests/protocol/test_data.py"
TOKENS = "tests/protocol/test_ragged.py"


def _interleaved_the_other_way(original, self, repeat_times=2, interleave=True):
    return original(self, repeat_times, not interleave)


def _first_objects(original, self, rows):
    chosen = original(self, rows)
    first = {name: column[: len(chosen)] for name, column in self.non_tensor_batch.items()}
    return chosen.with_non_tensor(**first)


def _left_is_right(original, rows, width, dtype, side="right"):
    return original(rows, width, dtype, "right" if side == "left" else "left")


def _every_row(original, mask, lengths, cleared):
    return original(mask, lengths, cleared | True)


def _padding_by_id(original, prompts, responses, numbers):
    inputs = original(prompts, responses, numbers)
    attention = (inputs["input_ids"] != 0).long()
    positions = (attention.cumsum(1) - 1).clamp(min=0)
    return inputs | {"attention_mask": attention, "position_ids": positions}


def _each_branch_counts(original, batch):
    found, places = original(batch)
    if places is None:
        return found, None
    return found.with_batch(first_branch=found.batch["response_mask"].any(1).long()), places


MUTANTS = [
    Mutant(
        "concat keeps the metrics of the first part",
        "verlite.protocol.data:joined_meta",
        calls(lambda original, parts: original(parts) | dict(parts[0])),
        (BATCH,),
    ),
    Mutant(
        "repeat interleaves the other way",
        DATA + "repeat",
        calls(_interleaved_the_other_way),
        (BATCH,),
    ),
    Mutant(
        "selected rows keep the object columns of the first rows",
        DATA + "select_idxs",
        calls(_first_objects),
        (BATCH,),
    ),
    Mutant(
        "union overwrites columns that differ",
        "verlite.protocol.data:equal",
        calls(lambda original, a, b: True),
        (BATCH,),
    ),
    Mutant("prompts are padded on the right", RAGGED + "pad", calls(_left_is_right), (TOKENS,)),
    Mutant(
        "padding is recognized by its token id",
        RAGGED + "model_inputs",
        calls(_padding_by_id),
        (TOKENS,),
    ),
    Mutant("another row's tokens are accepted", RAGGED + "_check_count", does_nothing, (TOKENS,)),
    Mutant("clearing one row clears all", RAGGED + "clear_rows", calls(_every_row), (TOKENS,)),
    Mutant(
        "a field of the wrong shape is accepted",
        FIELDS + "_check_tensor",
        result(lambda problems: []),
        ("tests/protocol/test_fields.py",),
    ),
    Mutant(
        "losses divide by the number of branches",
        "verlite.workers.training:split",
        calls(_each_branch_counts),
        ("tests/engine/test_branches.py",),
    ),
    Mutant(
        "a branch has its sibling's mask and numbers",
        "verlite.protocol.branches:Places.take",
        calls(lambda original, self, values: original(self, values).roll(1, 0)),
        ("tests/protocol/test_branches.py",),
    ),
]
