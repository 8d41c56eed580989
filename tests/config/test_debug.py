"""Which debugger a run has, and which time limits it does without."""

import pytest

from verlite.breakpoints import NO_LIMIT_S
from verlite.config import debug, keys, plan
from verlite.config.problems import ConfigError
from verlite.config.rules.context import KEYS
from verlite.config.schema import Config


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    for name in ("RAY_DEBUG", "RAY_DEBUG_POST_MORTEM"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("key", "variables", "expected"),
    [
        (False, {}, ""),
        (True, {}, "debugpy"),
        (False, {"RAY_DEBUG": "1"}, "debugpy"),
        (False, {"RAY_DEBUG": "0"}, ""),
        (False, {"RAY_DEBUG": "legacy"}, "legacy"),
        (True, {"RAY_DEBUG": "legacy"}, "legacy"),
        (False, {"RAY_DEBUG_POST_MORTEM": "1"}, "debugpy"),
        (False, {"RAY_DEBUG_POST_MORTEM": "0"}, ""),
        (False, {"RAY_DEBUG_POST_MORTEM": "1", "RAY_DEBUG": "legacy"}, "legacy"),
    ],
)
def test_key_and_variables_choose_the_debugger(monkeypatch, key, variables, expected):
    config = Config()
    config.trainer.debug = key
    config.ray_kwargs.ray_init.runtime_env.env_vars = variables
    assert debug.debugger(config) == expected
    config.ray_kwargs.ray_init.runtime_env.env_vars = {}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert debug.debugger(config) == expected


def test_limits_are_lifted_in_a_copy_only():
    config = Config()
    lifted = debug.without_limits(config)
    assert lifted.trainer.debug and not config.trainer.debug
    for name in debug.LIFTED:
        assert keys.get(lifted, name) == NO_LIMIT_S > keys.get(config, name)
    limits = {name for name in KEYS if name.endswith(("timeout_s", "deadline_s"))}
    assert set(debug.LIFTED) == limits
    # How long to wait for devices is not a limit that a stopped worker could exceed.
    assert lifted.trainer.resource_wait_s == config.trainer.resource_wait_s


@pytest.mark.parametrize(
    ("override", "variables", "expected"),
    [
        ("trainer.debug=true", {}, "trainer.debug=true: the package debugpy is not installed here"),
        ("", {"RAY_DEBUG": "1"}, "RAY_DEBUG=1: the package debugpy is not installed here"),
        ("", {"RAY_DEBUG_POST_MORTEM": "1"}, "RAY_DEBUG_POST_MORTEM=1: the package debugpy"),
        ("trainer.debug=true", {"RAY_DEBUG": "legacy"}, None),
        ("", {}, None),
    ],
)
def test_debugpy_must_be_installed(material, monkeypatch, override, variables, expected):
    installed = plan.installed
    monkeypatch.setattr(plan, "installed", lambda name: name != "debugpy" and installed(name))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if expected is None:
        material.load(*[override] if override else [])
        return
    with pytest.raises(ConfigError) as caught:
        material.load(*[override] if override else [])
    (problem,) = caught.value.problems
    assert str(problem).startswith(expected)
    assert "verlite[debug]" in str(problem) and problem.is_local
