"""A resumed run names changed keys and keeps the configuration of each start."""

import pytest

from verlite.files import RetryingWriter
from verlite.trainer.run_record import changed_keys, changes_of_segments, write_config

OLD = "optim: {lr: 0.001, betas: [0.9, 0.999]}\ndata: {seed: 1}\ngone: 1\n"
NEW = "optim: {lr: 0.005, betas: [0.9, 0.999]}\ndata: {seed: 1}\nadded: {x: null}\n"


def test_changed_keys_have_both_values(tmp_path):
    write_config(tmp_path, OLD, 0, RetryingWriter(pytest.fail))
    assert changed_keys(tmp_path, OLD) == []
    assert changed_keys(tmp_path, NEW) == [
        "optim.lr: 0.001 before, 0.005 now",
        "added.x: not there before, None now",
        "gone: 1 before, not there now",
    ]


def test_values_that_differ_only_far_from_their_beginning_are_named(tmp_path):
    long = "x" * 400
    write_config(tmp_path, f"path: {long}a\n", 0, RetryingWriter(pytest.fail))
    (line,) = changed_keys(tmp_path, f"path: {long}b\n")
    before, now = line.removeprefix("path: ").removesuffix(" now").split(" before, ")
    assert before.startswith("... xxx") and before.endswith("xxxa'") and now.endswith("xxxb'")
    assert len(line) < 120


@pytest.mark.parametrize("content", [None, "a: [", "text", ""])
def test_a_damaged_earlier_configuration_is_one_line(tmp_path, content):
    if content is not None:
        (tmp_path / "config.yaml").write_text(content)
    (line,) = changed_keys(tmp_path, NEW)
    assert "cannot be compared" in line


def test_each_start_keeps_its_configuration(tmp_path):
    writer = RetryingWriter(pytest.fail)
    write_config(tmp_path, OLD, 0, writer)
    write_config(tmp_path, NEW, 4, writer)
    kept = {file.name: file.read_text() for file in (tmp_path / "configs").iterdir()}
    assert kept == {"from_step_1.yaml": OLD, "from_step_5.yaml": NEW}
    assert (tmp_path / "config.yaml").read_text() == NEW
    write_config(tmp_path, OLD, 0, writer)
    assert [file.name for file in (tmp_path / "configs").iterdir()] == ["from_step_1.yaml"]
    (aside,) = tmp_path.glob("configs-until-*")
    assert (aside / "from_step_5.yaml").read_text() == NEW


def test_the_changes_of_each_segment_are_those_since_the_one_before(tmp_path):
    writer = RetryingWriter(pytest.fail)
    assert list(changes_of_segments(tmp_path)) == []
    for step, text in ((0, OLD), (9, NEW), (12, NEW), (99, OLD)):
        write_config(tmp_path, text, step, writer)
    (tmp_path / "configs" / "from_step_x.yaml").write_text("not one of them")
    ten, thirteen, hundred = changes_of_segments(tmp_path)
    assert ten == (
        10,
        [
            ("optim.lr", "0.001", "0.005"),
            ("added.x", "not there", "None"),
            ("gone", "1", "not there"),
        ],
    )
    assert thirteen == (13, [])
    assert hundred[0] == 100 and hundred[1][0] == ("optim.lr", "0.005", "0.001")
    (tmp_path / "configs" / "from_step_13.yaml").write_text("a: [")
    with pytest.raises(ValueError):
        list(changes_of_segments(tmp_path))


def test_segments_that_are_trained_again_are_renamed(tmp_path):
    writer = RetryingWriter(pytest.fail)
    for step, text in ((0, OLD), (10, NEW), (20, OLD)):
        write_config(tmp_path, text, step, writer)
    write_config(tmp_path, NEW, 10, writer)  # again from step 10, with nothing changed
    assert [step for step, _ in changes_of_segments(tmp_path)] == [11]
    assert len(list(tmp_path.glob("configs/from_step_21-until-*"))) == 1
    write_config(tmp_path, OLD, 10, writer)
    assert list(changes_of_segments(tmp_path)) == [(11, [])]
    (renamed,) = tmp_path.glob("configs/from_step_11-until-*")
    assert renamed.read_text() == NEW
