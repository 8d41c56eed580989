"""Limits of time and memory for chat templates, which are programs that come with a model.

transformers runs them in Jinja's sandbox: they reach no attributes of Python objects and no files.
The sandbox limits `range` to 100,000, but neither nested loops nor the size of texts.
"""

import ctypes
import faulthandler
import functools
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

SECONDS = 10.0
"""Longest time of one conversation. Usual templates take milliseconds."""
MEMORY = 1 << 30
"""Bytes that the process may grow by meanwhile."""
CPU_SECONDS = 60
"""CPU time of the process meanwhile, after which the system ends it."""
_CHECK_S = 0.25
"""Seconds between two looks at the clock."""

_PRODUCT = re.compile(r"(?<!\S)(?=(\S+) (\S+) (\*\*?) (\S+) (\S+))")
_LITERAL = re.compile(r"'\w*'|\d\S*")
_UNBOUNDED = re.compile(
    r"(?:\||filter) (?:"
    r"(round) \( (?!(?:(?:precision = )?\d{1,2} )?(?:, )?(?:(?:method = )?'\w*' )?\))"
    r"|(?=map)(\w+) \( (?!attribute = |'(?!round')\w+' [,)]))"
)
"""Calls of `round`, and of `map` with it or with a computed name, in the form of `_word`."""


class TemplateLimit(ValueError):
    """A chat template takes more time or memory than any conversation needs."""


class _TooLong(Exception):
    """Raised in the thread that renders."""


@contextmanager
def limited(tokenizer: Any, memory: bool = True) -> Iterator[None]:
    """Limit the block, which applies a tokenizer's chat template to one conversation.

    Args:
        tokenizer: Its template must not have arithmetic that grows without limit in one step.
        memory: Limit the growth of the process (Linux) and its CPU time. Not beside threads that
            use a GPU, which reserve addresses, or that compute.

    Raises:
        TemplateLimit: the template takes more than SECONDS or MEMORY, or see `_uninterruptible`.
    """
    templates = tokenizer.chat_template
    for template in templates.values() if isinstance(templates, dict) else [templates]:
        found = _uninterruptible(template) if isinstance(template, str) else ""
        if found:
            raise TemplateLimit(
                f"the chat template has {found}, which cannot be interrupted. Write it without "
                "(model.custom_chat_template)"
            )
    if memory and callable(tokenizer):
        tokenizer("")  # starts its threads, whose stacks may need more than MEMORY
    try:
        limits = (_cpu_limit(), _memory_limit()) if memory else (nullcontext(), nullcontext())
        with limits[0], limits[1], _WATCH.limit(SECONDS):
            yield
    except _TooLong:
        raise TemplateLimit(f"the chat template takes more than {SECONDS:g} s") from None
    except MemoryError:
        text = f"the chat template needs more than {MEMORY >> 20} MiB of memory"
        raise TemplateLimit(text) from None


@functools.lru_cache
def _uninterruptible(template: str) -> str:
    """Return which arithmetic of a template may take hours in one step of Python; "" without.

    That is a power, a product without a number or text in the template, which may double its digits
    each time, and `round` to more than 99 digits, which `map` may call, too.
    """
    from jinja2 import Environment, TemplateSyntaxError

    if not re.search(r"\*|\bround\b|\bmap\b", template):
        return ""
    try:
        tokens = [token[1:] for token in Environment().lex(template)]
    except TemplateSyntaxError:
        return ""  # rendering says what is wrong
    code = "; ; " + " ".join(_word(*token) for token in tokens if token[0] != "whitespace") + " ;"
    for first, before, stars, after, last in _PRODUCT.findall(code):
        if before in ("(", ","):  # f(*values, **values)
            continue
        if stars == "**":
            return "the operator **"
        is_after = _LITERAL.fullmatch(after) and last not in ("|", ".", "[", "(")
        is_before = _LITERAL.fullmatch(before) and first not in ("*", "/", "//", "%")
        if not (is_after or is_before):
            return f"the product {before} * {after}"
    found = _UNBOUNDED.search(code)
    return f"the filter {found[1] or found[2]} with a value that may be large" if found else ""


def _word(kind: str, text: str) -> str:
    if kind == "string":
        return "'" + re.sub(r"\W", "", text) + "'"
    return text if kind in ("name", "operator", "integer", "float") else ";"


@contextmanager
def _cpu_limit() -> Iterator[None]:
    """Let the system end the process after CPU_SECONDS, with the stacks of its threads.

    Nothing else ends one step of Python that computes for hours, such as the comparison of lists
    that contain each other twice, sixty times over: not even Ctrl-C.
    """
    if resource is None:
        yield
        return
    _, hard = before = resource.getrlimit(resource.RLIMIT_CPU)
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit = int(used.ru_utime + used.ru_stime) + CPU_SECONDS
    if any(old != resource.RLIM_INFINITY and old <= limit for old in before):
        yield
        return
    # The system may interrupt any thread, so the stacks of all are written.
    faulthandler.register(signal.SIGXCPU, file=2, all_threads=True, chain=True)
    resource.setrlimit(resource.RLIMIT_CPU, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_CPU, before)
        faulthandler.unregister(signal.SIGXCPU)


@contextmanager
def _memory_limit() -> Iterator[None]:
    """Limit the address space to its present size and MEMORY."""
    try:
        with open("/proc/self/statm", "rb") as file:
            size = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # not Linux
        yield
        return
    soft, hard = before = resource.getrlimit(resource.RLIMIT_AS)
    limit = size + MEMORY
    if (soft != resource.RLIM_INFINITY and soft < limit) or (
        hard != resource.RLIM_INFINITY and hard < limit
    ):
        yield
        return
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


class _Watch:
    """A thread that interrupts others which take too long. It ends when it has nothing to watch."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ends: dict[int, float] = {}
        self._interrupted: set[int] = set()
        self._thread: threading.Thread | None = None

    @contextmanager
    def limit(self, seconds: float) -> Iterator[None]:
        """Raise _TooLong in the block after so many seconds, between two steps of Python."""
        me = threading.get_ident()
        with self._lock:
            self._ends[me] = time.monotonic() + seconds
            self._interrupted.discard(me)  # the exception may have been raised in `finally`
            if self._thread is None or not self._thread.is_alive():  # a fork has no threads
                self._thread = threading.Thread(target=self._run, name="templates", daemon=True)
                self._thread.start()
        try:
            yield
        finally:
            with self._lock:
                self._ends.pop(me, None)
                late = me in self._interrupted
                self._interrupted.discard(me)
                if late:  # the exception may not have been raised yet
                    _raise_in(me, None)

    def _run(self) -> None:
        while True:
            time.sleep(_CHECK_S)
            with self._lock:
                if not self._ends:
                    self._thread = None
                    return
                now = time.monotonic()
                for thread, end in self._ends.items():
                    if now > end and thread not in self._interrupted:
                        self._interrupted.add(thread)
                        _raise_in(thread, _TooLong)


def _raise_in(thread: int, error: type[Exception] | None) -> None:
    value = None if error is None else ctypes.py_object(error)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), value)


_WATCH = _Watch()
