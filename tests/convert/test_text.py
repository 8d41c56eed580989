"""Conversions as text: a shell gets back each value, and YAML means the same as the command."""

import shlex

import pytest

from tests.convert.conftest import SAMPLES
from tests.convert.test_openrlhf import SMALLEST
from verlite.config.load import compose
from verlite.config.override_text import override
from verlite.convert import openrlhf, rlinf, text
from verlite.convert.engine import broken_rules

MODEL = "actor_rollout_ref.model.path"
STRINGS = [
    "/plain/path.json", "a b", "it's", 'say "hi"', "both ' and \"", "back\\slash", "ends\\", "true",
    "null", "12", "1e-3", "[x]", "{a}", "$HOME", "a=b", "a,b", "ü", "/mü", "~/x", "#x",
    "{{ m.content }}", "",
]  # fmt: skip


@pytest.mark.parametrize("value", STRINGS)
@pytest.mark.parametrize("key", ["trainer.experiment_name", "data.prompt_key"])
def test_text_survives_shell_and_hydra(key, value):
    """Alone and in a list, where Hydra's grammar allows less."""
    typed = shlex.split(f"main {shlex.quote(override(key, value))}")[1:]
    section, name = key.split(".")
    words = override("trainer.logger", [value, value])
    config = compose(None, [*typed, words, "data.train_files=x", f"{MODEL}=x"], check=False).config
    assert getattr(getattr(config, section), name) == value
    assert config.trainer.logger == [value, value]


@pytest.mark.parametrize(
    ("value", "typed"),
    [(5e-07, "5e-7"), (1e6, "1e6"), (0.95, "0.95"), (1.0, "1"), (0.1 + 0.2, "0.30000000000000004")],
)
def test_numbers(value, typed):
    assert override("a", value) == f"a={typed}"
    assert float(typed) == value


CONVERSIONS = [
    openrlhf.convert(shlex.split(SMALLEST + " --save_path 'a b' --lora_rank 4")),
    rlinf.convert(SAMPLES / "convert/rlinf.yaml"),
]


@pytest.mark.parametrize("conversion", CONVERSIONS, ids=lambda c: c.source)
def test_the_yaml_file_means_the_same_as_the_command(conversion, tmp_path):
    (tmp_path / "run.yaml").write_text(text.yaml_text(conversion))
    from_yaml = compose("run", [], tmp_path, check=False).config
    lines = text.command(conversion).splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("python -m verlite.main_ppo"))
    words = shlex.split("\n".join(lines[start:]).replace("\\\n", ""))
    assert words[:3] == ["python", "-m", "verlite.main_ppo"]
    assert compose(None, words[3:], check=False).config == from_yaml
    for comment in conversion.comments.values():
        assert comment.split()[0] in (tmp_path / "run.yaml").read_text()


@pytest.mark.parametrize("conversion", CONVERSIONS, ids=lambda c: c.source)
def test_comments_name_whole_keys(conversion):
    """Two keys may have the same last part, such as path or lr."""
    named = {line.removeprefix("# ").split()[0] for line in text.command(conversion).splitlines()}
    assert set(conversion.comments) <= named


@pytest.mark.parametrize("conversion", CONVERSIONS, ids=lambda c: c.source)
def test_lines_are_short_and_comments_aligned(conversion):
    lines = text.command(conversion).splitlines()
    comments = [line for line in lines if line.startswith("#")]
    assert max(map(len, comments)) <= 100
    assert all(line.startswith(("# ", "#   ")) for line in comments)


def test_rules_of_verlite_are_applied():
    (problem,) = broken_rules({"data.train_files": "x", "actor_rollout_ref.model.path": "x",
                               "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 1,
                               "algorithm.adv_estimator": "grpo_passk"})  # fmt: skip
    assert problem.key == "actor_rollout_ref.rollout.n"
