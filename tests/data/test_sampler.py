"""The sampler: each row at most once per epoch, a new order each epoch, and an exact resume."""

import json

import pytest

from verlite.data.sampler import PromptSampler


def batches(sampler: PromptSampler, count: int) -> list[list[int]]:
    return [sampler.next_batch() for _ in range(count)]


def test_every_row_is_used_if_batches_fill_the_epoch() -> None:
    sampler = PromptSampler(size=9, batch_size=3, seed=1)
    for epoch in range(3):
        assert set(sum(batches(sampler, 3), [])) == set(range(9)) and sampler.epoch == epoch


def test_incomplete_last_batch_of_an_epoch_is_dropped() -> None:
    sampler = PromptSampler(size=10, batch_size=3, seed=1)
    epochs = [sum(batches(sampler, sampler.steps_per_epoch), []) for _ in range(20)]
    assert sampler.steps_per_epoch == 3 and sampler.epoch == 19
    for epoch in epochs:
        assert len(set(epoch)) == 9 and set(epoch) <= set(range(10))
    assert len({tuple(epoch) for epoch in epochs}) == 20
    assert set(sum(epochs, [])) == set(range(10))  # each epoch drops other rows


def test_order_depends_only_on_the_seed() -> None:
    one, same, other = (batches(PromptSampler(50, 8, seed), 20) for seed in (5, 5, 6))
    assert one == same != other
    assert batches(PromptSampler(5, 2, seed=5, shuffle=False), 3) == [[0, 1], [2, 3], [0, 1]]


@pytest.mark.parametrize("size", [9, 10])  # without and with dropped rows
def test_resume_at_any_step_continues_exactly(size: int) -> None:
    straight = PromptSampler(size, 3, seed=7)
    expected = batches(straight, 12)
    for steps in range(12):
        first = PromptSampler(size, 3, seed=7)
        batches(first, steps)
        second = PromptSampler(size, 3, seed=7)
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert batches(second, 12 - steps) == expected[steps:]
        assert second.state_dict() == straight.state_dict()


def test_state_of_other_data_is_an_error() -> None:
    state = PromptSampler(10, 3, seed=7).state_dict()
    assert state == {"seed": 7, "shuffle": True, "epoch": 0, "position": 0, "size": 10}
    with pytest.raises(
        ValueError, match="counted 10 training prompts, data.train_files now has 11"
    ):
        PromptSampler(11, 3, seed=7).load_state_dict(state)
    with pytest.raises(ValueError, match="data.seed=7, but now data.seed=8"):
        PromptSampler(10, 3, seed=8).load_state_dict(state)
    with pytest.raises(ValueError, match="data.shuffle=True, but now data.shuffle=False"):
        PromptSampler(10, 3, seed=7, shuffle=False).load_state_dict(state)
    with pytest.raises(ValueError, match="position=11 is impossible"):
        PromptSampler(10, 3, seed=7).load_state_dict(state | {"position": 11})
    with pytest.raises(ValueError, match="expected .'epoch', 'position', 'seed'"):
        PromptSampler(10, 3, seed=7).load_state_dict({"seed": 7})


def test_batch_larger_than_the_data_is_an_error() -> None:
    with pytest.raises(
        ValueError, match="data.train_batch_size=11 is more than the 10 training prompts"
    ):
        PromptSampler(10, 11)
    with pytest.raises(ValueError, match="data.train_batch_size=0 must be at least 1"):
        PromptSampler(10, 0)
