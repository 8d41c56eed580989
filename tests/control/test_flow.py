"""The flow of prompts: hand-worked cases, and a naive reference that knows no counters."""

import json
import random
from itertools import combinations

import pytest

from verlite.control.flow import Flow, State


def flow(size=2, bound=1, depth=None, engines=2, swaps=True, **more) -> Flow:
    """Return a flow whose engines have their first weights."""
    found = Flow(size, bound, bound if depth is None else depth, engines, swaps, **more)
    found.published()
    return found


def start(one: Flow) -> list[int]:
    """Draw and start what is wanted. Returns the numbers that were started."""
    one.draw(one.wanted())
    return sorted(number for numbers in one.assign().values() for number in numbers)


def finish(one: Flow, *numbers: int) -> None:
    for number in numbers:
        assert one.finished(number)


def step(one: Flow) -> list[int]:
    """Train a step and publish."""
    numbers = one.choose()
    assert numbers is not None
    one.trained(numbers)
    one.published()
    return numbers


# Admission


def test_bound_0_is_one_batch_per_version_in_order():
    one = flow(size=3, bound=0)
    for number in range(4):
        batch = [3 * number, 3 * number + 1, 3 * number + 2]
        assert start(one) == batch and one.wanted() == 0
        finish(one, batch[2], batch[0])
        assert one.choose() is None
        finish(one, batch[1])
        assert one.choose() == batch
        one.trained(batch)
        assert one.wanted() == 0  # the engines still have the old weights
        one.published()


@pytest.mark.parametrize(("bound", "depth", "alive"), [(0, 4, 2), (3, 3, 8), (3, 1, 4), (3, 0, 2)])
def test_bound_and_depth_limit_the_groups_alive(bound, depth, alive):
    assert len(start(flow(size=2, bound=bound, depth=depth))) == alive


def test_a_run_draws_no_more_than_its_steps_need():
    one = flow(size=2, bound=4, total_steps=2)
    assert start(one) == [0, 1, 2, 3]
    finish(one, 0, 1, 2, 3)
    assert step(one) == [0, 1] and one.wanted() == 0
    assert step(one) == [2, 3] and one.wanted() == 0
    assert one.choose() is None


def test_another_is_drawn_in_place_of_one_that_is_filtered():
    one = flow(size=2, bound=0)
    start(one)
    finish(one, 0, 1)
    assert one.filtered(0, "equal scores") and one.filtered(1, "prompt too easy")
    assert start(one) == [2, 3]
    finish(one, 2, 3)
    assert step(one) == [2, 3]
    assert one.reasons == {"equal scores": 1, "prompt too easy": 1}
    assert one.counts() == {
        State.QUEUED: 0, State.RUNNING: 0, State.READY: 0, State.TRAINED: 2, State.FILTERED: 2,
    }  # fmt: skip


def test_more_than_is_wanted_cannot_be_drawn():
    with pytest.raises(ValueError, match="5 groups are drawn, but 4 are wanted"):
        flow(size=2, bound=1).draw(5)


# Assignment


def test_nothing_starts_before_the_engines_have_weights():
    one = Flow(2, 1, 1, 2, True)
    assert one.wanted() == 0 and one.choose() is None
    one.published()
    assert one.version == 1 and start(one) == [0, 1, 2, 3]


def test_groups_go_in_consecutive_runs_to_the_engines_with_the_fewest():
    one = flow(size=5, bound=1, engines=3)
    one.draw(4)
    assert one.assign() == {0: [0, 1], 1: [2], 2: [3]}
    finish(one, 2)
    one.draw(6)  # 2, 0 and 1 groups run; all have 3 at the end
    assert one.assign() == {1: [4, 5, 6], 2: [7, 8], 0: [9]}


def test_groups_of_a_dead_engine_go_first_and_elsewhere():
    one = flow(size=4, bound=1, engines=2)
    one.draw(4)
    assert one.assign() == {0: [0, 1], 1: [2, 3]}
    one.draw(4)
    assert one.engine_lost(1) == [2, 3]
    assert one.assign() == {0: [2, 3, 4, 5, 6, 7]}
    assert one.engine_lost(0) == [0, 1, 2, 3, 4, 5, 6, 7] and one.engine_lost(0) == []
    assert one.assign() == {}
    one.engine_back(1)
    assert one.assign() == {1: [0, 1, 2, 3, 4, 5, 6, 7]}
    one.engine_back(1)  # reported twice
    assert one.engine_lost(1) == [0, 1, 2, 3, 4, 5, 6, 7]


# Answers


def test_an_answer_counts_once_and_only_for_a_group_that_runs():
    one = flow(engines=2)
    start(one)
    assert one.finished(0) and not one.finished(0)
    one.engine_lost(0)  # ran 1
    assert not one.finished(1)
    one.assign()
    assert not one.filtered(1, "runs")
    assert one.finished(1)
    step(one)
    assert not one.finished(0) and not one.filtered(0, "late")
    assert one.gone == {State.TRAINED: 2}


@pytest.mark.parametrize("number", [-1, 4])
def test_a_group_that_was_never_drawn_has_no_answer(number):
    one = flow()
    start(one)
    with pytest.raises(ValueError, match=f"group {number} was never drawn: the last one is 3"):
        one.finished(number)


@pytest.mark.parametrize("oldest", [1, 4])
def test_an_engine_with_other_weights_than_it_was_given_is_noticed(oldest):
    one = flow(size=1, bound=1)
    start(one)
    finish(one, 0, 1)
    step(one)
    start(one)  # 2, under version 2
    finish(one, 2)
    step(one)
    start(one)
    with pytest.raises(ValueError, match=f"group 3 has tokens of version {oldest}.* version 3"):
        one.finished(3, oldest=oldest)


# Choice


def test_finished_groups_with_the_lowest_numbers_are_trained_first():
    one = flow(size=2, bound=2)
    start(one)  # 0 to 5
    finish(one, 5, 3, 2)
    assert step(one) == [2, 3]


def test_a_step_waits_for_a_group_that_would_exceed_the_bound():
    one = flow(size=2, bound=1)
    start(one)  # 0 to 3, of version 1: must be trained by step 2
    finish(one, 1, 2, 3)
    assert step(one) == [1, 2]
    start(one)  # 4, 5
    finish(one, 4, 5)
    assert one.choose() is None  # 3, 4 and 5 are ready
    finish(one, 0)
    assert step(one) == [0, 3]


def test_older_groups_are_taken_in_time_if_later_steps_have_no_place_for_all_of_them():
    """Groups 1 and 2, of version 1, must be trained by step 3. If step 2 took the finished group 3,
    step 3 would have to take two."""
    one = flow(size=1, bound=2)
    start(one)
    finish(one, 0)
    assert step(one) == [0]
    assert start(one) == [3]
    finish(one, 3)
    assert one.choose() is None
    with pytest.raises(ValueError, match="step 2 trains 0 groups of version 1 or older, but 1"):
        one.trained([3])
    finish(one, 2)
    assert step(one) == [2]
    assert one.choose() is None
    finish(one, 1)
    assert step(one) == [1] and one.choose() == [3]


def test_an_engine_that_dies_makes_its_groups_younger_and_ends_the_wait():
    one = flow(size=1, bound=1)
    start(one)
    finish(one, 0)
    assert step(one) == [0]
    start(one)
    finish(one, 2)
    assert one.choose() is None
    assert one.engine_lost(1) == [1]
    assert one.choose() == [2]


def test_a_group_that_was_sampled_later_than_it_was_started_is_younger():
    one = flow(size=1, bound=1)
    start(one)
    finish(one, 0)
    step(one)
    start(one)
    assert one.finished(1, oldest=2) and one.finished(2)
    assert step(one) == [1] and step(one) == [2]


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ([0], "a step needs 2 groups"),
        ([0, 0], "a step needs 2 groups"),
        ([0, 2], "group 2 is trained, but it is not ready"),
    ],
)
def test_only_what_is_ready_is_trained_once(numbers, message):
    one = flow(size=2, bound=1)
    start(one)
    finish(one, 0, 1)
    with pytest.raises(ValueError, match=message):
        one.trained(numbers)


def test_what_is_trained_is_forgotten():
    one = flow(size=3, bound=2)
    sizes = []
    for _ in range(50):
        finish(one, *start(one))
        step(one)
        sizes.append((len(one.groups), len(one.state_dict()["groups"])))
    assert set(sizes) == {(6, 6)} and one.gone == {State.TRAINED: 150}


# Weights


def test_without_swaps_publication_waits_and_nothing_starts_meanwhile():
    one = flow(size=1, bound=3, depth=1, swaps=False)
    start(one)  # 0, 1
    assert not one.may_publish()
    finish(one, 0)
    one.trained([0])
    assert one.wanted() == 1
    one.draw(1)
    assert one.assign() == {} and not one.may_publish()
    with pytest.raises(ValueError, match="while groups run, which needs swaps"):
        one.published()
    finish(one, 1)
    assert one.may_publish() and one.assign() == {}
    one.trained([1])  # before the first publication
    one.published()
    assert one.version == 3 and one.assign() == {0: [2]}


def test_with_swaps_publication_never_waits():
    one = flow(size=1, bound=1)
    start(one)
    finish(one, 0)
    one.trained([0])
    assert one.may_publish()
    one.published()
    assert one.groups[1].oldest == 1 and one.version == 2


# Checkpoints


def test_a_checkpoint_has_every_group_that_is_alive():
    one = flow(size=2, bound=2)
    start(one)  # 0 to 5
    finish(one, 0, 1, 2, 3)
    finish(one, 5)
    one.filtered(5, "x")
    step(one)  # 0, 1
    one.draw(1)
    state = json.loads(json.dumps(one.state_dict()))
    kept = Flow(2, 2, 2, 2, True)
    kept.load_state_dict(state, ready=[3, 4])  # 4 was running
    assert (kept.step, kept.version, kept.reasons) == (1, 0, {"x": 1})
    assert kept.counts() == {
        State.QUEUED: 3, State.RUNNING: 0, State.READY: 1, State.TRAINED: 2, State.FILTERED: 1,
    }  # fmt: skip
    assert kept.groups[3].oldest == 1
    kept.published()
    assert kept.assign() == {0: [2, 4], 1: [6]}  # 2 was ready, 4 ran, 6 is new
    assert kept.draw(kept.wanted()) == [7, 8]


def test_age_goes_on_after_a_resume():
    """Group 2 was sampled by version 1 with a bound of 1: step 2 waits for nothing and takes it."""
    one = flow(size=1, bound=1)
    start(one)
    finish(one, 0, 1)
    one.trained([0])
    again = Flow(1, 1, 1, 2, True)
    again.load_state_dict(one.state_dict(), ready=[1])
    again.published()
    start(again)
    finish(again, 2)
    assert again.version == 2 and again.choose() == [1]


def test_finished_groups_of_a_checkpoint_that_are_too_old_for_a_lower_bound_are_sampled_again():
    """Three of version 1, and after step 1 a bound of 2 leaves them steps 2 and 3."""
    one = flow(size=1, bound=3)
    start(one)
    finish(one, 0, 1, 2, 3)
    step(one)
    for bound, ready, queued in ((3, [1, 2, 3], []), (2, [1, 2], [3]), (0, [], [1, 2, 3])):
        again = Flow(1, bound, 2, 2, True)
        again.load_state_dict(one.state_dict(), ready=[3, 1, 2])
        states = {number: group.state for number, group in again.groups.items()}
        assert [n for n in states if states[n] is State.READY] == ready
        assert [n for n in states if states[n] is State.QUEUED] == queued
        assert all(again.groups[number].oldest == 1 for number in ready)
        again.published()
        assert (again.choose() or []) == ready[:1]


def test_a_lower_bound_starts_only_what_can_be_trained_in_time():
    one = flow(size=1, bound=3)
    start(one)
    again = Flow(1, 1, 1, 1, True)
    again.load_state_dict(one.state_dict())
    again.published()
    assert again.wanted() == 0 and again.assign() == {0: [0, 1]}


# A naive reference


class Naive:
    """The rules, with all groups that were ever drawn in one list, and searches through it."""

    def __init__(self, size, bound, depth):
        self.size, self.bound, self.depth = size, bound, depth
        self.step, self.version = 0, 0
        self.groups = []  # state, oldest version

    def all(self, *states):
        return [n for n, (state, _) in enumerate(self.groups) if state in states]

    def wanted(self):
        alive = len(self.all("queued", "running", "ready"))
        admitted = alive + len(self.all("trained"))
        count = 0
        while (
            self.version
            and admitted + count < (self.version + self.bound) * self.size
            and alive + count < (1 + self.depth) * self.size
        ):
            count += 1
        return count

    def in_time(self, numbers, step):
        """Whether these can be trained from a step on, the oldest first."""
        oldest = sorted(self.groups[n][1] for n in numbers)
        return all(step + k // self.size - old <= self.bound for k, old in enumerate(oldest))

    def choose(self):
        started = self.all("running", "ready")
        for numbers in combinations(self.all("ready"), self.size):
            if self.in_time(set(started) - set(numbers), self.step + 2):
                return list(numbers)
        return None


@pytest.mark.parametrize("seed", range(40))
def test_decisions_are_those_of_a_naive_reference(seed):
    draw = random.Random(seed)
    size, bound, depth = draw.randint(1, 3), draw.randint(0, 4), draw.randint(0, 4)
    one, naive = Flow(size, bound, depth, 3, True), Naive(size, bound, depth)
    for _ in range(150):
        assert one.wanted() == naive.wanted()
        for number in one.draw(draw.randint(0, one.wanted())):
            assert number == len(naive.groups)
            naive.groups.append(("queued", None))
        if draw.random() < 0.5:
            started = sorted(number for found in one.assign().values() for number in found)
            assert started == (naive.all("queued") if naive.version else [])
            for number in started:
                naive.groups[number] = ("running", naive.version)
        running = naive.all("running")
        if running and draw.random() < 0.7:
            number = draw.choice(running)
            oldest = draw.randint(naive.groups[number][1], naive.step + 1)
            assert one.finished(number, oldest)
            naive.groups[number] = ("ready", oldest)
        if naive.groups and draw.random() < 0.1:
            number = draw.randrange(len(naive.groups))
            is_ready = naive.groups[number][0] == "ready"
            assert one.filtered(number, "x") == is_ready
            if is_ready:
                naive.groups[number] = ("filtered", None)
        if draw.random() < 0.05:
            for number in one.engine_lost(draw.randrange(3)):
                assert naive.groups[number][0] == "running"
                naive.groups[number] = ("queued", None)
            for engine in range(3):
                one.engine_back(engine)
        chosen = one.choose()
        assert chosen == naive.choose()
        if chosen is not None and draw.random() < 0.8:
            one.trained(chosen)
            assert all(naive.step + 1 - naive.groups[n][1] <= bound for n in chosen)
            for number in chosen:
                naive.groups[number] = ("trained", None)
            naive.step += 1
        if draw.random() < 0.3:
            one.published()
            naive.version = naive.step + 1
        states = ("queued", "running", "ready", "trained", "filtered")
        assert list(one.counts().values()) == [len(naive.all(state)) for state in states]
    assert naive.step > 0


def test_groups_that_a_service_failed_are_sampled_again_in_their_places():
    one = flow(size=2, bound=1)
    assert start(one) == [0, 1, 2, 3]
    finish(one, 0, 1, 3)
    one.again([0, 1])
    assert one.choose() is None and one.counts()[State.QUEUED] == 2
    assert start(one) == [0, 1]  # before any other, and none is drawn in their place
    finish(one, 0, 1)
    assert step(one) == [0, 1]
    with pytest.raises(ValueError, match="group 2 is put back, but it is not ready"):
        one.again([2])
