"""Outside text reaches the terminal without control characters, whichever command prints it."""

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from tests.report.test_samples import SEARCHED
from tests.trainer.runs import driver_state
from verlite.cli import app
from verlite.terminal import CleanStream, Countdown, clean, console
from verlite.trainer import checkpoints, stop
from verlite.trainer.display import Display
from verlite.trainer.errors import RunRefused
from verlite.trainer.stop import print_error

EVIL = "\x1b]0;title\x07\x1b[2J\x1b[31m\x9b1m\x9d0;a\x9c\u202eabc\u2066\u200f\r\x08"
EVIL += "[x][/x][bold]:warning:"
"""An escape sequence of each kind, C1 controls, reordering, and markup of rich."""
FORBIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""Written out again, so that a character that the code forgets is missed."""


def printed(*arguments: str) -> str:
    """Run a command in this process. Nothing but an exit may be raised."""
    done = CliRunner().invoke(app, list(arguments))
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    assert not FORBIDDEN.search(done.output), ascii(done.output)
    return done.output


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run directory whose every text is EVIL."""
    folder = tmp_path / f"run{EVIL.replace('/', '')}"
    (folder / "rollouts").mkdir(parents=True)
    sample = SEARCHED | {
        "data_source": EVIL,
        "prompt": EVIL,
        "status": EVIL,
        "error": EVIL,
        "ground_truth": EVIL,
        "reward_parts": {EVIL: EVIL, "acc": 1.0},
        "transcript": [["model", EVIL], ["tool", EVIL], ["model", EVIL]],
        "turn_infos": [{"action": EVIL, "called": True, "seconds": 0.1}],
    }
    (folder / "rollouts" / "step_1.jsonl").write_text(json.dumps(sample) + "\n")
    metrics = {"step": 1, "critic/score/mean": 0.5, f"val-core/{EVIL}/reward/mean@1": 0.5}
    (folder / "metrics.jsonl").write_text(json.dumps(metrics) + "\n")
    (folder / "config.yaml").write_text(json.dumps({"a": EVIL}))
    (folder / "run.json").write_text(json.dumps({"host": EVIL, "exit_code": 1}))
    (folder / "error.json").write_text(json.dumps({"message": EVIL}))
    (folder / "logs").mkdir()
    (folder / "logs" / f"{EVIL.replace('/', '')}.log").write_text(EVIL)
    state = driver_state(1, model={"path": EVIL})
    checkpoints.write(folder, 1, state, lambda folder: None)
    return folder


def test_commands_that_read_a_run(run_dir: Path, tmp_path: Path) -> None:
    shown = printed("show", str(run_dir))
    assert shown.count(":warning:") >= 9 and "is malformed" not in shown
    assert "\\x1b]0;title" in shown.replace("\n", "")
    assert ":warning:" in printed("ls", str(tmp_path))
    assert printed("curve", str(run_dir)).count(":warning:") == 2
    assert ":warning:" in printed("report", str(run_dir), "-o", str(tmp_path / "page.html"))
    assert ":warning:" in printed("bugreport", str(run_dir), "-o", str(tmp_path / "b.zip"))
    assert ":warning:" in printed("export", str(run_dir), str(tmp_path / "out"))
    assert ":warning:" in printed("stacks", str(run_dir))


def test_commands_that_read_a_file_or_an_argument(tmp_path: Path) -> None:
    rows = tmp_path / f"{EVIL.replace('/', '')}.jsonl"
    rows.write_text(json.dumps({"q": EVIL, EVIL: EVIL}))
    told = printed(
        "data", str(rows), "--prompt", "q", "--answer", EVIL, "-o", f"{tmp_path}/a.parquet"
    )
    assert ":warning:" in told
    assert ":warning:" in printed(
        "data", str(rows), "--prompt", EVIL, "--answer", "b", "-o", "a.parquet"
    )
    assert ":warning:" in printed("check", f"trainer.{EVIL}=1")
    assert ":warning:" in printed("plan", f"algorithm.adv_estimator='{EVIL}'")
    assert ":warning:" in printed("explain", EVIL)
    assert ":warning:" in printed("convert", "openrlhf", "--", f"--{EVIL}", EVIL)
    script = tmp_path / f"{EVIL.replace('/', '')}.yaml"
    script.write_text(json.dumps({EVIL: EVIL}))
    assert ":warning:" in printed("convert", "rlinf", str(script))
    assert ":warning:" in printed("convert", "trl", str(script))
    assert ":warning:" in printed(EVIL)


@pytest.mark.parametrize("terminal", [False, True])
def test_a_training_run(terminal: bool) -> None:
    out = io.StringIO()
    logged: list[str] = []
    screen = console(file=out)
    screen._force_terminal = terminal
    display = Display(screen, logged.append)
    display.begin(total_steps=2)
    with display.phase(EVIL):
        display.warn(EVIL)
        display.info(EVIL)
        display.step(1, {f"val-core/{EVIL}/reward/mean@1": 0.5})
    display.close()
    print_error(RunRefused(EVIL), screen)
    try:
        raise KeyError(EVIL)
    except KeyError as error:
        error.add_note(EVIL)
        print_error(error, screen)
    text = out.getvalue()
    # What rich itself writes to a terminal: colors, and the cursor around the live line.
    own = re.compile("\x1b\\[[0-9;?]*[a-zA-Z]|\r") if terminal else re.compile("(?!)")
    assert not FORBIDDEN.search(own.sub("", text))
    assert "\x1b]0" not in text and "\x1b[2J\x1b[31m" not in text
    assert text.count(":warning:") >= 6


def test_what_is_written_without_python_streams(capfd: pytest.CaptureFixture[str]) -> None:
    stop.write_error(f"error: {EVIL}\n")
    assert capfd.readouterr().err == f"error: {clean(EVIL)}\n"


def test_text_of_people_is_unchanged() -> None:
    text = "Zürich 東京 🙂 👩‍👩‍👧 שלום\tx\n"
    assert clean(text) == text
    stream = CleanStream(io.StringIO())
    stream.writelines([text, "a\x1b"])
    print("\udcff", file=stream)  # type: ignore[call-overload]
    assert stream.getvalue() == text + "a\\x1b\\udcff\n"


def test_a_terminal_that_takes_ascii_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """There click, and so typer.echo, would write to the stream's bytes."""
    below = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr("sys.stdout", CleanStream(below))
    typer.echo(f"Zürich {EVIL}")
    print("東京")
    below.flush()
    text = below.buffer.getvalue().decode()  # type: ignore[attr-defined]
    assert text.startswith("Z\\xfcrich \\x1b]0;title\\x07") and "\\u6771\\u4eac" in text
    assert not FORBIDDEN.search(text)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def terminal_below(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Return a terminal below the cleaned streams of this process."""
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "500")
    monkeypatch.delenv("NO_COLOR", raising=False)
    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", CleanStream(terminal))
    monkeypatch.setattr("sys.stderr", CleanStream(terminal))
    return terminal


def test_a_countdown_shows_an_address_and_markup_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    below = terminal_below(monkeypatch)
    with Countdown() as countdown:
        for seconds in (2, 1):
            countdown.show(f"waiting for [fe80::1]:6379: {EVIL}, giving up in {seconds} s")
    text = below.getvalue()
    assert "[fe80::1]:6379" in text and "[x][/x][bold]:warning:" in text
    assert "\x1b]" not in text and "\x1b[2J\x1b[31m" not in text and "\x9b" not in text


def test_colors_reach_the_terminal_also_beside_a_live_line(monkeypatch: pytest.MonkeyPatch) -> None:
    below = terminal_below(monkeypatch)
    display = Display()
    display.begin(total_steps=2)
    print(f"a library {EVIL}")
    print_error(RunRefused(EVIL), console())
    display.close()
    text = below.getvalue()
    assert "\x1b[1;31merror: \x1b[0m\\x1b]0;title" in text
    assert "\\x1b[1;31m" not in text and "\x1b]" not in text and "\x9b" not in text


@pytest.mark.process
def test_the_training_commands_clean_what_they_print() -> None:
    line = [sys.executable, "-m", "verlite.main_ppo", f"trainer.{EVIL}=1"]
    done = subprocess.run(line, capture_output=True, text=True, env=os.environ)
    assert done.returncode == 2 and ":warning:" in done.stderr
    assert not FORBIDDEN.search(done.stdout + done.stderr)
