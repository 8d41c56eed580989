"""Templates that would run or grow without end are errors, and leave no limits behind."""

import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.models import tiny_tokenizer
from verlite import chat_template
from verlite.chat_template import TemplateLimit, limited
from verlite.data.prompts import build_prompt, build_prompts

MESSAGES = [{"role": "user", "content": "1+1="}]
DOUBLING = (
    "{% set ns = namespace(x='0123456789') %}"
    "{% for i in range(60) %}{% set ns.x = GROWN %}{% endfor %}{{ ns.x | length }}"
)


@pytest.fixture(autouse=True)
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "SECONDS", 0.3)
    monkeypatch.setattr(chat_template, "MEMORY", 128 << 20)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "0.3 s"),
        ("{{ 9 ** 9 ** 9 ** 9 }}", r"the operator \*\*"),
        (DOUBLING.replace("GROWN", "ns.x * ns.x"), r"the product x \* ns"),
        ("{{ x * 1 * x }}", "the product 1 \\* x"),
        ("{{ x * (x) }}", "the product x"),
        ("{{ x * ''|default(x) }}", "the product x"),
        ("{{ 1.5 | round(99999999, 'ceil') }}", "the filter round"),
        ("{{ 1.5 | round(precision=1 + x) }}", "the filter round"),
        ("{{ [1.5] | map('round', 9 * 999999, 'ceil') }}", "the filter map"),
        ("{{ [1.5] | map('ro' 'und', 999999) }}", "the filter map"),
        ("{{ [1.5] | map(messages[0].role) }}", "the filter map"),
        ("{% filter round(99999999, 'ceil') %}1.5{% endfilter %}", "the filter round"),
        (DOUBLING.replace("GROWN", "ns.x ~ ns.x"), "128 MiB of memory"),
        (DOUBLING.replace("GROWN", "ns.x * 9"), "128 MiB of memory"),
        (DOUBLING.replace("GROWN", "[ns.x, ns.x] | join"), "128 MiB of memory"),
        ("{{ 'a'.center(10000000000) }}", "128 MiB of memory"),
        ("{{ '%01000000000d' % 1 }}", "128 MiB of memory"),
        ("{{ ([0] * 1000000000) | length }}", "128 MiB of memory"),
    ],
)
def test_a_template_without_end_is_an_error(
    template: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reason != "0.3 s":  # a busy machine must not come first
        monkeypatch.setattr(chat_template, "SECONDS", 60.0)
    tokenizer = tiny_tokenizer()
    usual = tokenizer.chat_template
    expected = build_prompt(tokenizer, MESSAGES)
    kinds = resource.RLIMIT_AS, resource.RLIMIT_CPU
    before = [resource.getrlimit(kind) for kind in kinds]
    tokenizer.chat_template = template
    for _ in range(2):
        with pytest.raises(TemplateLimit, match=reason):
            build_prompts(tokenizer, [MESSAGES])
        with pytest.raises(TemplateLimit, match=reason):
            build_prompt(tokenizer, MESSAGES)
    assert [resource.getrlimit(kind) for kind in kinds] == before
    tokenizer.chat_template = usual
    assert build_prompts(tokenizer, [MESSAGES, MESSAGES]) == [expected, expected]


@pytest.mark.parametrize(
    "template",
    [
        "{{ '  ' * messages|length }} a * b",
        "{{ messages|length * 2 }}",
        "{# x * x #}{% for message in messages %}{{ loop.index0 * 3 * 4 }}{% endfor %}",
        "{{ 1.26 | round(1) }} {{ 1.2 | round }} {{ 1.2 | round(method='ceil') }}",
        "{{ 1.2 | round(2, 'floor') }} {{ 1.2 | round(precision=1, method='ceil') }}",
        "{{ messages | map(attribute='role') | list }} {{ ['a'] | map('upper') | list }}",
    ],
)
def test_usual_arithmetic_is_not_refused(template: str) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    assert build_prompt(tokenizer, MESSAGES)


@pytest.mark.process
def test_a_step_of_python_without_end_ends_the_process() -> None:
    """Each list has the last one twice, so the comparison takes 2**99 steps. The system interrupts
    another thread, as it may."""
    template = (
        "{% set ns = namespace(a=[0], b=[0]) %}{% for i in range(99) %}"
        "{% set ns.a = [ns.a, ns.a] %}{% set ns.b = [ns.b, ns.b] %}{% endfor %}{{ ns.a == ns.b }}"
    )
    program = (
        "import resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0))\n"
        "from tests.models import tiny_tokenizer\n"
        "from verlite import chat_template\n"
        "from verlite.data.prompts import build_prompt\n"
        "tokenizer = tiny_tokenizer()\n"
        "tokenizer.chat_template = 'imports what templates need, before the limit'\n"
        f"build_prompt(tokenizer, {MESSAGES!r})\n"
        "chat_template.CPU_SECONDS = 1\n"
        f"tokenizer.chat_template = {template!r}\n"
        "import signal, threading\n"
        "threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGXCPU])\n"
        f"build_prompt(tokenizer, {MESSAGES!r})\n"
    )
    root = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=root, timeout=300
    )
    assert done.returncode == -signal.SIGXCPU
    assert 'File "<template>", line' in done.stderr
    assert "in build_prompt" in done.stderr


def test_stars_in_text_are_no_powers() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "**a** {{ '**b**' }} {% macro f() %}{% endmacro %}{{ f() }}"
        "{{ dict(messages[0], **{'content': ''})['role'] }}"
    )
    assert build_prompt(tokenizer, MESSAGES)


def test_a_thread_is_interrupted_alone() -> None:
    """The others go on, and each thread has its own time."""
    ended: dict[str, Any] = {}

    def spin(name: str, seconds: float) -> None:
        end = time.monotonic() + seconds
        try:
            with limited(tokenizer, memory=False):
                while time.monotonic() < end:
                    pass
            ended[name] = "done"
        except TemplateLimit as error:
            ended[name] = str(error)

    tokenizer = tiny_tokenizer()
    threads = [
        threading.Thread(target=spin, args=arguments)
        for arguments in (("long", 60.0), ("short", 0.01), ("longer", 60.0))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    late = "the chat template takes more than 0.3 s"
    assert ended == {"long": late, "short": "done", "longer": late}
