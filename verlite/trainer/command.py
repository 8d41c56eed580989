"""How a training command runs: from the first signal handler to the exit code.

`main` is what main_ppo, main_sft and main_dpo share. Each of them names how its configuration is
loaded and what trains: `train_rl` here, or `sft.train.run_to_end`. torch, Ray and transformers are
imported only for a valid configuration.
"""

import gc
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

from verlite.files import tolerate_full_disk
from verlite.terminal import clean_output, console
from verlite.trainer.stop import Stop, leave

if TYPE_CHECKING:
    from verlite.config.load import LoadedConfig


def main(
    load: Callable[[], "LoadedConfig[Any]"],
    run_to_end: Callable[["LoadedConfig[Any]", Stop], int],
    is_first: bool = True,
) -> int:
    """Load the configuration, run it, and return the exit code (docs/failures.md).

    Args:
        load: returns the configuration; exits with 2 if it is invalid.
        run_to_end: does all checks, trains, and returns the exit code.
        is_first: whether this is the first of several processes, which prints.
    """
    stop = Stop()
    try:
        with stop:  # before the other imports, which take longer than all that comes before them
            try:
                return _main(load, run_to_end, stop, is_first)
            except KeyboardInterrupt:  # here, so that another signal changes no exit code
                _leave_interrupted(stop, is_first)
    except KeyboardInterrupt:  # while `stop` was entered
        _leave_interrupted(stop, is_first)


def _main(
    load: Callable[[], "LoadedConfig[Any]"],
    run_to_end: Callable[["LoadedConfig[Any]", Stop], int],
    stop: Stop,
    is_first: bool,
) -> int:
    loaded = load()
    from verlite.trainer.errors import REFUSED, exit_code

    try:
        return run(loaded, run_to_end, stop, is_first)
    except Exception as error:
        if isinstance(error, REFUSED) and not is_first:
            return stop.decide(exit_code(error))  # the first process says it
        return stop.report(error)


def run(
    loaded: "LoadedConfig[Any]",
    run_to_end: Callable[["LoadedConfig[Any]", Stop], int],
    stop: Stop,
    is_first: bool = True,
) -> int:
    """Print the notes, run, and return the exit code: 0 also if the run was complete already.

    Raises:
        KeyboardInterrupt: a signal came when nothing had to be saved.
        Exception: what ended the run.
    """
    if loaded.notes and is_first:
        from verlite.config.problems import notes_text

        console().print(notes_text(loaded.notes, loaded.command.explain), soft_wrap=True)
    from verlite.control.exit_codes import DONE
    from verlite.trainer.errors import AlreadyComplete

    try:
        return run_to_end(loaded, stop)
    except AlreadyComplete as done:
        if is_first:
            console().print(str(done), markup=False, soft_wrap=True)
        return stop.decide(DONE)


def train_rl(loaded: "LoadedConfig[Any]", stop: Stop) -> int:
    """Do all checks, train as main_ppo does, and return the exit code.

    A stop that gives up a step raises StepAborted, wherever the step is. The run then goes back to
    the end of the step before, and `finalize` saves what is not saved yet.

    Raises:
        REFUSED, AlreadyComplete, KeyboardInterrupt, or what ended the run.
    """
    from verlite.trainer.launch import launched

    with launched(loaded, stop) as launch:  # imports the following in a thread while Ray starts
        from verlite.trainer import ppo
        from verlite.trainer.build import finalize, open_run
        from verlite.trainer.errors import StepAborted

        with open_run(launch) as run, _few_collections():
            try:
                ppo.train(run)
            except StepAborted:
                run.undo_step()
            return stop.decide(finalize(run))


@contextmanager
def _few_collections() -> Iterator[None]:
    """Look for garbage cycles after 100,000 new objects, not after 700. A step has a few for each
    sample, and nearly all of them live until its end, so that collections were most of the time in
    which the driver receives 65,536 samples."""
    before = gc.get_threshold()
    gc.set_threshold(100_000, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _leave_interrupted(stop: Stop, is_first: bool) -> NoReturn:
    """Say that a signal has ended the command, unless that was said, and end the process."""
    if stop.machine.code is None and is_first:
        console(stderr=True).print(stop.message(), soft_wrap=True, highlight=False)
    sys.stdout.flush()
    # sys.exit would wait for threads, such as one that imports torch or one in a collective.
    os._exit(stop.machine.exit_code)


def run_as_program(main: Callable[[], int]) -> NoReturn:
    """Run what `python -m` names, and end the process with its exit code."""
    tolerate_full_disk()
    clean_output()
    leave(main())
