"""A copy of the project, and pytest in it with or without a bug."""

import atexit
import compileall
import multiprocessing
import os
import py_compile
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil

from tests.mutants import Mutant

# What most tests import takes longer to import than they take to run: one process has it ready, and each run is a fork of that one.
READY = ["torch", "transformers", "transformers.models.auto.modeling_auto", "transformers.models.qwen2.modeling_qwen2",
         "transformers.models.llama.modeling_llama", "transformers.generation.utils", "tensordict", "torch.distributed.fsdp",
         "torch.distributed.checkpoint", "hydra", "pyarrow.parquet", "rich.table", "pytest"]  # fmt: skip
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(READY)
LIMIT_S = 900


def copy_project(top: Path, copy: Path) -> Path:
    """The files that git knows, as they are in the working tree: no build output, no leftovers."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=top, check=True, capture_output=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        if (top / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(top / name, copy / name)
    # Bytecode is compared by the source's hash: a time stamp would let an old file pass for one changed within the same second.
    compileall.compile_dir(copy, quiet=2, invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH)
    return copy


def result(copy: Path, mutant: Mutant) -> tuple[str, str]:
    """yes, hangs or **no**, and pytest's output, for the bug in the copy. The file is put back afterwards."""
    name, file, old, new, test = mutant
    path = copy / file
    text = path.read_text()
    if text.count(old) != 1:
        return "**no**", f"{name}: the text to replace stands {text.count(old)} times in {file}"
    path.write_text(text.replace(old, new))
    try:
        code, output = run_pytest(copy, ["-x", *test.split()])
    finally:
        path.write_text(text)
    if code is None or "from pytest-timeout" in output or "+ Timeout +" in output:
        return "hangs", output
    # 1: a test failed. 2 is an import that broke, 5 no test at all: neither shows that a test looks at the bug.
    return ("yes", output) if code == 1 else ("**no**", f"pytest ended with code {code}\n{output}")


def run_pytest(copy: Path, arguments: list[str], limit_s: float = LIMIT_S) -> tuple[int | None, str]:
    """pytest's exit code (None: out of time) and output."""
    log = copy.with_suffix(".log")
    process = PROCESSES.Process(target=_pytest, args=(copy, arguments, log))
    process.start()
    process.join(limit_s)
    code = process.exitcode
    if code is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.join()
    _end_leftovers(copy)
    return code, log.read_text(errors="replace")


def _end_leftovers(copy: Path) -> None:
    """Some bugs are that processes stay behind; they are told by the environment that they were started with."""
    for process in psutil.process_iter():
        try:
            if process.environ().get("PYTHONPATH") == str(copy):
                process.kill()
        except psutil.Error:
            continue


def _pytest(copy: Path, arguments: list[str], log: Path) -> None:
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it, and so would what tests start
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.chdir(copy)
    for name in [name for name in sys.modules if name.split(".")[0] == "tests"]:
        del sys.modules[name]  # this very package, which comes from the project and not from the copy
    sys.path[:] = [str(copy), *(path for path in sys.path if path not in ("", str(Path(__file__).parents[2])))]
    os.environ.update(PYTHONPATH=str(copy), PYTHONDONTWRITEBYTECODE="1")
    sys.dont_write_bytecode = True

    import pytest

    # A process that a test starts imports its parent's main module again: that must not be the harness.
    sys.modules["__main__"] = sys.modules["__mp_main__"] = sys.modules["pytest"]
    code = int(pytest.main(["-q", "-p", "no:cacheprovider", "--timeout", "120", *arguments]))
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code)
