"""Lines of a run without a terminal: clock times, phases, silence, and the time that is left."""

import io
import re
import time

import pytest
from rich.console import Console

from verlite.trainer import display as displays
from verlite.trainer.display import Display, duration

METRICS = {
    "critic/score/mean": 0.25,
    "response_length/mean": 5.5,
    "response_length/clip_ratio": 0.125,
    "rollout/zero_variance_groups": 0.75,
    "actor/grad_norm": 0.5,
    "training/log_prob_gap": 2e-7,
    "val-core/openai/gsm8k/reward/mean@1": 0.5,
    "perf/total_num_tokens": 6000.0,
    "perf/time_per_step": 2.0,
}


class Screen:
    """A display whose lines can be read, without their clock times."""

    def __init__(self, terminal=False, **begin):
        self.out = io.StringIO()
        self.logged = []
        console = Console(file=self.out, force_terminal=terminal, width=200)
        self.display = Display(console, self.logged.append)
        if begin:
            self.display.begin(**begin)

    @property
    def lines(self):
        return [line[15:] for line in self.out.getvalue().splitlines()]


def test_the_line_of_a_step_says_what_matters_with_a_clock_time():
    screen = Screen(total_steps=40)
    screen.display.step(1, METRICS)
    screen.display.close()
    assert re.match(r"\d\d-\d\d \d\d:\d\d:\d\d step 1/40", screen.out.getvalue())
    assert screen.lines == [
        "step 1/40  score 0.250  length 5.5  cut 12%  signal 25%  grad 0.500  gap 2.0e-07  "
        "val openai/gsm8k mean@1 0.500  3000 tokens/s  2.0 s"
    ]
    assert screen.logged == screen.lines


def test_groups_are_left_out_if_the_estimator_does_not_compare_them():
    screen = Screen(total_steps=40, groups=False)
    screen.display.step(1, METRICS)
    screen.display.close()
    assert "signal" not in screen.out.getvalue()


def test_the_time_left_follows_the_newest_steps(monkeypatch):
    """The first step and the pause before a resumed one do not count."""
    clock = [1000.0]
    monkeypatch.setattr(displays.time, "monotonic", lambda: clock[0])
    screen = Screen(total_steps=110, done=10)
    for step in range(11, 111):
        clock[0] += 1000.0 if step == 11 else 10.0 if step <= 60 else 20.0
        screen.display.step(step, {})
    screen.display.close()
    left = [line.partition("  ")[2] for line in screen.lines]
    assert left[:2] == ["", "16 min left"]  # 98 steps of 10 s
    assert left[49] == "8 min left"  # 50 steps of 10 s
    assert left[98] == "20 s left" and left[99] == ""  # the newest 50 steps took 20 s each


def test_phases_of_the_start_get_a_line_and_those_of_the_first_step_after_a_second():
    screen = Screen()
    with screen.display.phase("starting Ray"):
        assert screen.display.current_phase == "starting Ray"
    screen.display.begin(2)
    for step in (0, 1, 2):
        for phase in ("ref", "gen"):
            with screen.display.phase(phase):
                begin = time.monotonic()
                screen.display.break_silence(begin + 0.5)
                for second in range(2, 5):
                    screen.display.break_silence(begin + second * (phase == "gen"))
        screen.display.step(step, {})
    with screen.display.phase("writing Hugging Face export"):
        pass
    screen.display.close()
    assert screen.lines == [
        "starting Ray",
        "generating responses",
        "step 0/2",
        "generating responses",
        "step 1/2",
        "step 2/2",
        "writing Hugging Face export",
    ]
    assert screen.logged == screen.lines


def test_silence_is_broken_after_a_minute_and_then_less_often():
    screen = Screen()
    begin = time.monotonic()
    screen.display._trained = True
    with screen.display.phase("gen"):
        for second in range(0, 60):
            screen.display.break_silence(begin + second)
        assert screen.lines == []
        screen.display.break_silence(begin + 61)
        assert screen.lines == ["still generating responses, 61 s after the last line"]
        now = time.monotonic()
        screen.display.break_silence(now + 119)
        screen.display.break_silence(now + 121)
        assert len(screen.lines) == 2
    with screen.display.phase("update_actor"):
        screen.display.break_silence(time.monotonic() + 61)
    screen.display.break_silence(time.monotonic() + 1000)  # between two phases
    assert len(screen.lines) == 3 and "updating the actor" in screen.lines[2]


def test_a_terminal_has_a_live_line_and_no_clock_times():
    screen = Screen(terminal=True, total_steps=2)
    with screen.display.phase("gen"):
        pass
    screen.display.info("resumed")
    screen.display.close()
    text = screen.out.getvalue()
    assert "resumed" in text and "0/2" in text
    assert not re.search(r"\d\d-\d\d \d\d:\d\d", text) and "generating responses" not in text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "0 s"),
        (99, "99 s"),
        (99.5, "2 min"),
        (3599, "1 h"),
        (4980, "1 h 23 min"),
        (86400, "1 d"),
        (100_000, "1 d 3 h"),
    ],
)
def test_durations_have_two_units_at_most(seconds, text):
    assert duration(seconds) == text


def test_where_a_run_is() -> None:
    display = Display()
    assert display.where() == "while starting" and display.where(3) == "in step 3"
    with display.phase("testing"):
        assert display.where() == "while testing" and display.where(3) == "in step 3 (testing)"
    display.close()
