"""A program in a process of its own that serves many samples: how it starts, ends, starts again."""

import asyncio
import sys

import psutil
import pytest

from verlite import own_process
from verlite.own_process import OwnProcess, ProcessEnded

pytestmark = pytest.mark.process

SERVE = """
import os, subprocess, sys
child = subprocess.Popen(["sleep", "600"])
print("ready", os.getpid(), child.pid, os.environ.get("COLOR"), os.environ.get("MY_TOKEN"))
for line in sys.stdin:
    sys.stdout.flush()
    if line == "raise\\n":
        raise ValueError("out of ideas")
    print(line.upper(), end="", flush=True)
"""


class Program:
    """`SERVE`, and the lines that it wrote."""

    def __init__(self, code=SERVE, python=sys.executable, **options):
        self.lines = asyncio.Queue()
        settings = {"start_s": 60.0, "memory_gb": 2.0, **options}
        self.process = OwnProcess(
            [python, "-u", "-c", code],
            self.ready,
            on_line=lambda line: self.lines.put_nowait(line.decode()),
            **settings,
        )

    async def ready(self, process):
        self.greeting = (await self.lines.get()).split()

    async def ask(self, line):
        ended = await self.process.running()
        await self.process.send(line.encode())
        answer = asyncio.ensure_future(self.lines.get())
        await asyncio.wait((answer, ended), return_when=asyncio.FIRST_COMPLETED)
        answer.cancel()
        return answer.result() if answer.done() and not answer.cancelled() else ended.result()


def child_of(process):
    """Return the program itself, whose parent is its keeper."""
    (child,) = psutil.Process(process._process.pid).children()
    return child


def run(main, *args, **options):
    async def inside():
        program = Program(*args, **options)
        async with program.process:
            return await main(program)

    return asyncio.run(asyncio.wait_for(inside(), 120))


def alive(greeting):
    return [pid for pid in map(int, greeting[1:3]) if psutil.pid_exists(pid)]


def test_one_process_serves_many_and_ends_with_its_children(monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "x")
    monkeypatch.setenv("COLOR", "red")

    async def main(program):
        answers = [await program.ask(text) for text in ("a", "b", "c")]
        return answers, program.process.starts, program.greeting, alive(program.greeting)

    answers, starts, greeting, running = run(main)
    assert answers == ["A\n", "B\n", "C\n"] and starts == 1
    assert len(running) == 2 and alive(greeting) == []
    assert greeting[3:] == ["red", "None"]  # secrets stay here


def test_one_that_died_says_why_and_is_started_again():
    async def main(program):
        await program.ask("a")
        first = program.greeting
        with pytest.raises(ProcessEnded, match="ended with exit code 1: ValueError: out of ideas"):
            await program.ask("raise")
        answer = await program.ask("b")
        return first, answer, program.process.starts

    first, answer, starts = run(main)
    assert (answer, starts) == ("B\n", 2) and alive(first) == []


def test_one_that_was_killed_says_so():
    async def main(program):
        ended = await program.process.running()
        psutil.Process(int(program.greeting[1])).kill()
        await asyncio.wait((ended,), timeout=60)
        return str(ended.exception()), alive(program.greeting)

    cause, running = run(main)
    assert "was killed by SIGKILL" in cause and running == []


def test_one_that_hangs_is_ended_for_all_that_wait():
    async def main(program):
        ended = await program.process.running()
        await program.process.end("it did not answer")
        first = program.greeting
        return str(ended.exception()), alive(first), await program.ask("b")

    cause, running, answer = run(main)
    assert "was ended: it did not answer" in cause and (running, answer) == ([], "B\n")


def test_two_that_end_it_leave_the_next_one_alone(monkeypatch):
    """The slower of them comes back when it has been started again."""
    end, slow = own_process.end_kept, asyncio.Event()
    calls = 0

    async def ending(process):
        nonlocal calls
        calls += 1
        await end(process)
        if calls == 2:
            await slow.wait()

    monkeypatch.setattr(own_process, "end_kept", ending)

    async def main(program):
        await program.process.running()
        first, second = (asyncio.create_task(program.process.end("it hangs")) for _ in range(2))
        await first
        answer = await program.ask("b")
        slow.set()
        await second
        return answer, program.greeting, alive(program.greeting), program.process.starts

    answer, greeting, running, starts = run(main)
    assert (answer, len(running), starts) == ("B\n", 2, 2)
    assert alive(greeting) == []  # and it was ended in the end


@pytest.mark.parametrize(
    ("code", "python", "cause"),
    [
        ("import no_such_package", sys.executable, "No module named 'no_such_package'"),
        ("print()", "/no/such/python", "/no/such/python: No such file or directory"),
        ("import time; time.sleep(600)", sys.executable, "was not ready within 1 s"),
    ],
)
def test_one_that_cannot_start_says_why_to_all(monkeypatch, code, python, cause):
    """Samples that wait for the same start share its failure: it is not tried for each of them."""
    monkeypatch.setattr(own_process, "AGAIN_S", 0.5)
    limit = 1.0 if "sleep" in code else 60.0

    async def main(program):
        starts = [program.process.running() for _ in range(5)]
        errors = await asyncio.gather(*starts, return_exceptions=True)
        once = program.process.starts
        while program.process.starts == once:  # later ones try again
            with pytest.raises(ProcessEnded):
                await program.process.running()
        return errors, once

    async def never(process):
        await asyncio.Event().wait()

    async def inside():
        program = Program(code, python, start_s=limit)
        program.process._ready = never
        async with program.process:
            return await main(program)

    errors, once = asyncio.run(asyncio.wait_for(inside(), 120))
    assert once == 1 and all(cause in str(error) for error in errors)


def test_one_without_a_process_is_started_again(monkeypatch):
    """The machine may lack processes or files for a moment."""
    monkeypatch.setattr(own_process, "AGAIN_S", 0.0)
    start = own_process.start_kept

    async def fails(*arguments):
        monkeypatch.setattr(own_process, "start_kept", start)
        raise OSError("no more processes")

    monkeypatch.setattr(own_process, "start_kept", fails)

    async def main(program):
        with pytest.raises(ProcessEnded, match="cannot be started: no more processes"):
            await program.process.running()
        assert not (await program.process.running()).done()
        return program.process.starts

    assert run(main) == 2


def test_another_loop_may_start_a_process_at_the_same_moment(monkeypatch):
    """Then uvloop raises this, before it forks."""
    start, refusals = asyncio.create_subprocess_exec, ["process", "process"]

    async def racing(*arguments, **options):
        if refusals:
            raise RuntimeError(f"Racing with another loop to spawn a {refusals.pop()}.")
        return await start(*arguments, **options)

    async def main():
        process = await own_process.start_kept("print('said')", [], 2.0, None, {})
        output, _ = await process.communicate()
        return output

    monkeypatch.setattr(asyncio, "create_subprocess_exec", racing)
    assert asyncio.run(asyncio.wait_for(main(), 60)) == b"said\n" and not refusals


def test_other_errors_of_a_start_are_raised(monkeypatch):
    async def refuse(*_, **__):
        raise RuntimeError("no loop")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", refuse)
    with pytest.raises(RuntimeError, match="no loop"):
        asyncio.run(own_process.start_kept("", [], 2.0, None, {}))
