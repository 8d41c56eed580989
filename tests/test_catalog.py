"""The catalog agrees with the code that it names."""

import dataclasses
import functools
import inspect
import sys
import zlib
from types import ModuleType

import pytest
import torch

from tests.algorithms.differential import REJECT, SETTINGS, inputs_of
from tests.algorithms.reference import random_case
from verlite.algorithms import advantages, losses
from verlite.algorithms.advantages import AdvantageInputs, compute_advantages, place_scores
from verlite.algorithms.aggregation import token_weights
from verlite.algorithms.kl import kl_estimate
from verlite.algorithms.losses import PolicyLossInputs, policy_loss
from verlite.config.plan import installed
from verlite.envs import factory, openenv
from verlite.importing import OwnCodeError, SignalExit, import_module
from verlite.rewards import routing
from verlite.spec import catalog
from verlite.spec.roles import EnvSpec

EVERY_ESTIMATOR_READS = {"token_level_rewards", "response_mask", "uid", "valid", "alone"}
EVERY_LOSS_READS = {
    "log_prob",
    "old_log_prob",
    "advantages",
    "response_mask",
    "weights",
    "tokens",
    "rollout_is_weights",
    "extra",
}


def recording(cls: type, seen: set[str]) -> type:
    """Return a subclass of a dataclass that records in `seen` which fields are read, outside
    dataclasses.replace.
    """
    names = {field.name for field in dataclasses.fields(cls)}

    def read(self, name):
        caller = sys._getframe(1).f_globals["__name__"]
        if name in names and caller != "dataclasses":
            seen.add(name)
        return object.__getattribute__(self, name)

    return type(f"Recording{cls.__name__}", (cls,), {"__getattribute__": read})


class RecordingDict(dict):
    """A dict that records which keys are asked for."""

    def __init__(self, entries: dict, seen: set[str]):
        super().__init__(entries)
        self.seen = seen

    def get(self, key, default=None):
        self.seen.add(key)
        return super().get(key, default)

    def __getitem__(self, key):
        self.seen.add(key)
        return super().__getitem__(key)


def values_of(inputs) -> dict:
    return {field.name: getattr(inputs, field.name) for field in dataclasses.fields(inputs)}


@pytest.mark.parametrize("name", catalog.ESTIMATORS)
def test_estimator_reads_what_the_catalog_declares(name):
    seen: set[str] = set()
    for seed in range(5):
        inputs = recording(AdvantageInputs, seen)(**values_of(inputs_of(random_case(seed))))
        seen.clear()
        catalog.load(catalog.ESTIMATORS[name].path)(inputs)
    assert seen - EVERY_ESTIMATOR_READS == set(catalog.ESTIMATORS[name].reads)


@pytest.mark.parametrize("name", catalog.LOSSES)
def test_loss_reads_what_the_catalog_declares(name):
    seen: set[str] = set()
    case = random_case(1)
    extra = RecordingDict({"rollout_correction": REJECT}, seen)
    tokens = int(case.mask.sum())
    weights = token_weights(case.mask, "token-mean", tokens=tokens, sequences=len(case.mask))
    inputs = recording(PolicyLossInputs, seen)(
        log_prob=torch.where(case.mask.bool(), case.log_prob, 0),
        old_log_prob=torch.where(case.mask.bool(), case.old, 0),
        advantages=torch.where(case.mask.bool(), case.advantages, 0),
        response_mask=case.mask,
        weights=weights,
        tokens=tokens,
        extra=extra,
        **SETTINGS[0],
    )
    seen.clear()
    catalog.load(catalog.LOSSES[name].path)(inputs)
    given_by_the_loop = {"selected", "generator"} if catalog.LOSSES[name].selector else set()
    assert seen - EVERY_LOSS_READS - given_by_the_loop == set(catalog.LOSSES[name].reads)
    assert ("selected" in seen) == (catalog.LOSSES[name].selector is not None)


BY_ROW = [name for name, entry in catalog.ESTIMATORS.items() if entry.by_row]


@pytest.mark.parametrize("name", BY_ROW)
def test_estimators_by_row_need_one_reward_per_row(name):
    inputs = inputs_of(random_case(5))
    per_token, _ = compute_advantages(name, inputs)
    one_column = dataclasses.replace(
        inputs,
        token_level_rewards=inputs.rewards.sum(-1, keepdim=True),
        response_mask=inputs.mask.any(-1, keepdim=True).long(),
    )
    by_row, _ = compute_advantages(name, one_column)
    torch.testing.assert_close(torch.where(inputs.mask, by_row, 0), per_token)
    assert per_token.any()


@pytest.mark.parametrize("name", catalog.ESTIMATORS)
def test_comparing_estimators_give_a_single_sample_no_advantage(name):
    case = random_case(0)
    alone = dataclasses.replace(inputs_of(case), uid=case.uid.copy())
    for row in range(len(alone.uid)):
        alone.uid[row] = f"prompt {row}"
    alone = dataclasses.replace(
        alone,
        token_level_rewards=place_scores(torch.arange(len(alone.uid)) + 1.0, case.mask),
        token_level_scores=None,
    )
    advantages, _ = compute_advantages(name, alone)
    assert (not advantages.any()) == catalog.ESTIMATORS[name].compares


def rows_of(inputs: AdvantageInputs, rows: torch.Tensor) -> AdvantageInputs:
    """Return some rows of an estimator's inputs."""
    given = {name: value for name, value in values_of(inputs).items() if name != "uid"}
    chosen = {name: v[rows] for name, v in given.items() if isinstance(v, torch.Tensor)}
    return AdvantageInputs(**(given | chosen | {"uid": inputs.uid[rows.numpy()]}))


@pytest.mark.parametrize("name", catalog.ESTIMATORS)
def test_advantages_by_group_need_no_other_group(name):
    is_same = []
    for seed in range(20):
        inputs = inputs_of(random_case(seed))
        whole = compute_advantages(name, inputs)
        for uid in sorted(set(inputs.uid)):
            rows = torch.from_numpy(inputs.uid == uid)
            alone = compute_advantages(name, rows_of(inputs, rows))
            pairs = zip(whole, alone, strict=True)
            is_same += [torch.allclose(one[rows], own, rtol=1e-5) for one, own in pairs]
    assert all(is_same) == catalog.ESTIMATORS[name].by_group


def test_every_path_exists():
    tables = (catalog.ESTIMATORS, catalog.LOSSES, catalog.ENV_FACTORIES, catalog.TRACKERS)
    for table in tables:
        for name in table:
            assert callable(catalog.resolve(name, table, "entry")), name
    for path in {*catalog.SCORERS.values(), *routing.IN_PROCESS}:
        assert callable(catalog.load(path)), path
    for entry in catalog.LOSSES.values():
        assert entry.selector is None or callable(catalog.load(entry.selector))


@pytest.mark.process  # importing vLLM takes as long as starting a process
@pytest.mark.parametrize("name", catalog.ENGINES)
def test_every_engine_exists(name):
    if name == "vllm" and not installed("vllm"):
        pytest.skip("needs vllm")
    assert callable(catalog.resolve(name, catalog.ENGINES, "rollout.name"))


def public_functions(module: ModuleType, first_argument: type) -> set[str]:
    """Return paths of public functions of a module whose only argument has the given type."""
    found = set()
    for name, function in inspect.getmembers(module, inspect.isfunction):
        if name.startswith("_") or function.__module__ != module.__name__:
            continue
        arguments = [p.annotation for p in inspect.signature(function).parameters.values()]
        returns = inspect.signature(function).return_annotation
        if arguments == [first_argument] and getattr(returns, "__origin__", None) is tuple:
            found.add(f"{module.__name__}:{name}")
    return found


def test_no_estimator_loss_or_environment_is_missing():
    assert public_functions(advantages, AdvantageInputs) == {
        entry.path for entry in catalog.ESTIMATORS.values()
    }
    assert public_functions(losses, PolicyLossInputs) == {
        entry.path for entry in catalog.LOSSES.values()
    }
    factories = {
        f"{cls.__module__}:{name}"
        for name, cls in inspect.getmembers(factory, inspect.isclass)
        + [("OpenEnv", openenv.OpenEnv)]
        if issubclass(cls, factory.EnvFactory) and cls is not factory.EnvFactory
    }
    assert factories == set(catalog.ENV_FACTORIES.values())


def test_scorer_settings_are_the_keyword_arguments_of_the_reward_functions():
    assert set(catalog.SCORER_SETTINGS) == set(catalog.SCORERS.values())
    for path, settings in catalog.SCORER_SETTINGS.items():
        parameters = list(inspect.signature(catalog.load(path)).parameters)
        assert parameters[:4] == ["data_source", "solution_str", "ground_truth", "extra_info"]
        assert tuple(parameters[4:]) == settings


def test_scorer_for_a_data_source():
    for source in ("openai/gsm8k", "math", "math_dapo_reasoning", "lighteval/MATH"):
        assert catalog.scorer_for(source) == catalog.SCORERS[source] == routing.scorer_of(source)
    assert catalog.scorer_for("aime2025") == catalog.SCORERS["aime*"]
    assert catalog.scorer_for("mathematics") is None


@pytest.mark.parametrize("kind", catalog.KL_KINDS)
def test_every_kl_kind_is_implemented(kind):
    assert kl_estimate(torch.tensor([-1.0]), torch.tensor([-2.0]), kind).isfinite().all()


@pytest.mark.parametrize("mode", catalog.AGGREGATION_MODES)
def test_every_aggregation_mode_is_implemented(mode):
    weights = token_weights(torch.ones(2, 3), mode, tokens=6, sequences=2, scale=3.0)
    assert (weights > 0).all()


double_clipped = functools.partial(advantages.grpo)
"""A user's own estimator that is not a plain function."""


def test_own_estimator_may_be_a_partial():
    inputs = inputs_of(random_case(2))
    own, _ = compute_advantages(f"{__name__}:double_clipped", inputs)
    built_in, _ = compute_advantages("grpo", inputs)
    assert torch.equal(own, built_in)


def test_loss_function_equals_loss_name():
    ones = torch.ones(1, 2)
    inputs = PolicyLossInputs(
        log_prob=-ones,
        old_log_prob=-2 * ones,
        advantages=ones,
        response_mask=ones.long(),
        weights=ones / 2,
        tokens=2,
    )
    by_name, _ = policy_loss("vanilla", inputs)
    by_function, _ = policy_loss(losses.vanilla, inputs)
    assert by_name == by_function


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gropo", "unknown estimator 'gropo': did you mean grpo or opo or rloo? known: gae"),
        ("xyzzy", "unknown estimator 'xyzzy': known: gae"),
        (
            "no_such_package.mine:f",
            "no_such_package.mine cannot be loaded: ModuleNotFoundError: No module named",
        ),
        ("tests.test_catalog:nothing", "tests.test_catalog has no function or class 'nothing'"),
        ("tests.test_catalog:__name__", "__name__ is of type str, not a function or class"),
        (
            "tests/mine.py:f",
            "estimator 'tests/mine.py:f' names a file, but must name a module, package.module:name."
            " Write mine:f, and put the file's folder on the Python path of every worker",
        ),
        ("mine.py:f", "names a file, but must name a module, package.module:name. Write mine:f"),
    ],
)
def test_unknown_name_is_reported(name, words):
    with pytest.raises(ValueError) as error:
        catalog.resolve(name, catalog.ESTIMATORS, "estimator")
    assert words in str(error.value)


REMEDY = "; it must be on the Python path of every worker"


@pytest.mark.parametrize(
    ("code", "name", "words"),
    [
        ("f = 1\n1 / 0", "f", " cannot be loaded: ZeroDivisionError: division by zero (FILE:2)"),
        ("\nimport no_such", "f", " cannot be loaded: ModuleNotFoundError: "
         "No module named 'no_such' (FILE:2)"),
        ("f = len", "g", " has no function or class 'g'"),
        ("f = 1", "f", ":f is of type int, not a function or class"),
        (None, "f", " cannot be loaded: ModuleNotFoundError: No module named 'MODULE'" + REMEDY),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_users_module(tmp_path, monkeypatch, code, name, words):
    """The whole message: the line is the user's, and the path is to blame only if it is."""
    module = f"own_{zlib.crc32(repr((code, name)).encode())}"
    file = tmp_path / f"{module}.py"
    if code is not None:
        file.write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ValueError) as error:
        catalog.resolve(f"{module}:{name}", catalog.ESTIMATORS, "estimator")
    words = words.replace("FILE", str(file)).replace("MODULE", module)
    assert str(error.value) == f"estimator '{module}:{name}': {module}{words}"


def test_a_users_file_that_is_missing_or_broken_is_named_without_a_line_of_the_importer(tmp_path):
    with pytest.raises(OwnCodeError, match=r"mine.py cannot be loaded: FileNotFoundError: [^(]*$"):
        import_module(str(tmp_path / "mine.py"))
    (tmp_path / "mine.py").write_text("import no_such")
    with pytest.raises(OwnCodeError, match=r"named 'no_such' \(\S+mine.py:1\)$"):
        import_module(str(tmp_path / "mine.py"))


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        ("KeyboardInterrupt", KeyboardInterrupt),
        ("verlite.importing.SignalExit", SignalExit),
        ("SystemExit", ValueError),
        ("ZeroDivisionError", ValueError),
    ],
)
def test_a_signal_while_a_users_code_runs_is_no_error_of_it(tmp_path, monkeypatch, error, raised):
    file = tmp_path / f"raises_{error.rpartition('.')[2]}.py"
    file.write_text(f"import verlite.importing\nraise {error}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "path", [*sys.path])
    for place in (str(file), file.stem):
        with pytest.raises(raised):
            import_module(place)
    with pytest.raises(raised):
        catalog.resolve(f"{file.stem}:f", catalog.ESTIMATORS, "estimator")

    def fail(**options):
        exec(file.read_text())

    monkeypatch.setattr(factory, "resolve", lambda *names: fail)
    with pytest.raises(raised):
        factory.build_env_factory(EnvSpec("package.module:Made"))
