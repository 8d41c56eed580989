"""A run with a reference service: the numbers of a local reference, and refusal of other models."""

import json
import signal
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from transformers import AutoConfig, AutoTokenizer

from tests.models import tiny_model
from tests.trainer.runs import Launch, quiet, write_reward, write_sums
from verlite.config.schema import Config, DataConfig
from verlite.engine.folder import vocabulary_digest
from verlite.engine.reference_wire import ModelInfo
from verlite.trainer import checks, opening, reference
from verlite.trainer.errors import RunRefused
from verlite.weights.probe import Probe

INFO = ModelInfo(
    "float32 float32:01", "toy", 128, 64, "float32", {"float32": 1, "bfloat16": 2}, {"a": 3}, 1
)
PROBE = Probe((1, 2, 3), (-1.0, -4.0), float("inf"))


# The checks at the start.


@pytest.fixture
def config(monkeypatch):
    """A configuration whose service computes the probe's own log-probs."""
    made = Config(data=DataConfig(train_files="x"))
    made.actor_rollout_ref.model.path = "/models/policy"
    answers(monkeypatch, [-1.0, -4.0])
    return made


def answers(monkeypatch, values):
    found = [np.array(values, np.float32)]
    monkeypatch.setattr(reference, "log_probs", lambda *arguments: found)


def describing(name, fingerprint, probe=PROBE):
    def describe(dtypes):
        assert list(dtypes) == list(INFO.fingerprints)
        return [(name, fingerprint, probe)] * 2

    return describe


def test_weights_of_the_policy_are_accepted_and_recorded(config, tmp_path):
    reference.check_weights(config, INFO, tmp_path, 0, describing("float32", 1))
    record = json.loads((tmp_path / reference.RECORD).read_text())
    assert record["fingerprints"] == {"float32": 1, "bfloat16": 2}
    reference.check_weights(config, INFO, tmp_path, 0, describing("bfloat16", 2))
    reference.check_weights(config, INFO, tmp_path, 0, describing("", 0))  # the probe decides


def test_other_weights_are_refused(config, tmp_path):
    for name, fingerprint in (("float32", 2), ("bfloat16", 1)):
        with pytest.raises(RunRefused, match="other weights than actor_rollout_ref"):
            reference.check_weights(config, INFO, tmp_path, 0, describing(name, fingerprint))
    assert not (tmp_path / reference.RECORD).exists()


@pytest.mark.parametrize("values", [[-4.0, -1.0], [-1.1, -4.1], [float("nan"), -4.0]])
def test_equal_weights_that_compute_other_numbers_are_refused(
    config, tmp_path, monkeypatch, values
):
    answers(monkeypatch, values)
    with pytest.raises(RunRefused, match="computes other log-probs than the policy before its"):
        reference.check_weights(config, INFO, tmp_path, 0, describing("float32", 1))


def test_resumed_run_needs_the_reference_of_its_start(config, tmp_path):
    def never(dtypes):
        raise AssertionError("the policy has been trained since")

    with pytest.raises(RunRefused, match="reference.json is missing"):
        reference.check_weights(config, INFO, tmp_path, 7, never)
    record = tmp_path / reference.RECORD
    for damaged in ("{", "[]", '{"fingerprints": 3}'):
        record.write_text(damaged)
        with pytest.raises(RunRefused, match="reference.json is missing or damaged"):
            reference.check_weights(config, INFO, tmp_path, 7, never)
    record.write_text(json.dumps({"fingerprints": {"bfloat16": 2}}))
    reference.check_weights(config, INFO, tmp_path, 7, never)
    record.write_text(json.dumps({"fingerprints": {"bfloat16": 3}}))
    with pytest.raises(RunRefused, match="is not the one that this run began with"):
        reference.check_weights(config, INFO, tmp_path, 7, never)
    record.write_text(json.dumps({"fingerprints": {"other": 3}}))
    with pytest.raises(RunRefused, match="is not the one that this run began with"):
        reference.check_weights(config, INFO, tmp_path, 7, never)


def test_other_sizes_are_named():
    text = SimpleNamespace(a=4)
    described = SimpleNamespace(get_text_config=lambda: text)
    found = SimpleNamespace(service=INFO, described=described, model=SimpleNamespace(path="/m"))
    with pytest.raises(RunRefused, match="another model, toy, than .*path=/m: a 3 instead of 4"):
        checks.reference_model(found)
    text.a = 3
    checks.reference_model(found)


@pytest.mark.parametrize("longest", [64, 65])
def test_longest_sequence_must_fit(config, monkeypatch, longest):
    monkeypatch.setattr(checks.reference_client, "check", lambda ref: (INFO, "one is silent"))
    plan = SimpleNamespace(reference_urls=["http://a"], longest_sequence=longest)
    monkeypatch.setattr(opening, "make_plan", lambda config: plan)
    found = opening.rl_preflight(config)
    if longest == 64:
        checks.reference_service(found)
        assert found.service == INFO and found.findings.warnings == ["one is silent"]
        return
    with pytest.raises(RunRefused, match="up to 64 tokens; samples of this run may have 65"):
        checks.reference_service(found)


# The teacher's service.


@pytest.fixture
def distilling(tmp_path):
    """Checks of a run with a teacher's service, and the digest of its tokenizer."""
    model = tiny_model(tmp_path / "policy")
    tokenizer = AutoTokenizer.from_pretrained(model)
    distillation = SimpleNamespace(enabled=True)
    found = SimpleNamespace(
        config=SimpleNamespace(distillation=distillation),
        model=SimpleNamespace(path=model),
        tokenizer=tokenizer,
        described=AutoConfig.from_pretrained(model),
    )
    return found, vocabulary_digest(tokenizer)


def test_a_service_tells_the_digest_of_its_tokenizer(distilling):
    found, digest = distilling
    found.teacher_service = replace(INFO, vocabulary=digest)
    checks.teacher(found)
    for other, words in (("", "without a tokenizer"), ("0" * 64, "has another tokenizer than")):
        found.teacher_service = replace(INFO, vocabulary=other)
        with pytest.raises(RunRefused, match=f"teacher_model.url: .*{words}"):
            checks.teacher(found)
    found.teacher_service = replace(INFO, vocabulary=digest, vocab_size=127)
    with pytest.raises(RunRefused, match="has 127 token ids, and the policy may sample 128"):
        checks.teacher(found)


def test_tokenizers_with_the_same_tokens_have_the_same_digest(distilling):
    """Also with another chat template; not if one token is added, or two have changed places."""
    tokenizer, digest = distilling[0].tokenizer, distilling[1]
    tokenizer.chat_template = "other"
    assert vocabulary_digest(tokenizer) == digest
    tokenizer.add_tokens(["<new>"])
    assert vocabulary_digest(tokenizer) != digest


def test_a_resumed_run_needs_the_teacher_of_its_start(tmp_path):
    reference.check_teacher(INFO, tmp_path, 0)
    reference.check_teacher(INFO, tmp_path, 7)
    other = replace(INFO, fingerprints={"float32": 3})
    key = "distillation.teacher_models.teacher_model.url"
    with pytest.raises(RunRefused, match=f"{key}: the service's model toy .* is not the one"):
        reference.check_teacher(other, tmp_path, 7)
    (tmp_path / reference.TEACHER_RECORD).unlink()
    with pytest.raises(RunRefused, match="teacher.json is missing"):
        reference.check_teacher(INFO, tmp_path, 7)


# Whole runs.


@contextmanager
def serving(model, *options):
    """Run `verlite serve reference`; yield (its process, its address)."""
    command = [sys.executable, "-m", "verlite", "serve", "reference", "--model_path", model]
    process = subprocess.Popen(
        [*command, "--port=0", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        line = process.stdout.readline()
        assert line.startswith("serving "), line
        yield process, line.split()[-1]
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        process.stdout.close()


@pytest.mark.process
@pytest.mark.timeout(600)
def test_run_with_a_service_has_the_numbers_of_a_local_reference(tmp_path, tiny_qwen2):
    """The reference differs from the policy after the first of two updates of a step, and in step
    2. The service has two processes and another micro-batching."""
    reward = write_reward(tmp_path / "reward.py", "return sum(c.isdigit() for c in solution_str)")
    base = [
        f"data.train_files={write_sums(tmp_path / 'train.parquet', 16)}",
        f"custom_reward_function.path={reward}",
        f"actor_rollout_ref.model.path={tiny_qwen2}",
        "data.train_batch_size=4",
        "data.max_prompt_length=8",
        "data.max_response_length=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=3",
        "actor_rollout_ref.actor.optim.lr=3e-3",
        # With Adam's 1e-8, a gradient of the size of float32's noise moves a weight by lr, and with
        # 1e-5 still far enough to change a sample of step 2.
        "actor_rollout_ref.actor.optim.eps=1e-2",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "actor_rollout_ref.actor.kl_loss_coef=0.1",
        "actor_rollout_ref.rollout.name=hf",
        "actor_rollout_ref.rollout.n=2",
        "actor_rollout_ref.rollout.temperature=0.8",
        "algorithm.adv_estimator=grpo",
        "algorithm.use_kl_in_reward=true",
        "trainer.total_training_steps=2",
        "trainer.save_freq=2",
        "trainer.device=cpu",
    ]

    def launch(name, *more):
        return Launch(tmp_path / name, [*base, *more], tmp_path / f"{name}.log", forked=True)

    local = launch("local")
    assert local.wait() == 0, local.text()
    with serving(tiny_qwen2, "--tensor_parallel_size=2") as (_, url):
        served = launch("served", f"actor_rollout_ref.ref.url={url}")
        assert served.wait() == 0, served.text()
    assert f"reference by the service at {url}" in served.text()
    assert "ref on" not in served.text() and not list((served.run_dir / "logs").glob("ref_*"))
    assert len(local.metrics()) == len(served.metrics()) == 2
    for ours, theirs in zip(local.metrics(), served.metrics(), strict=True):
        want = {key: value for key, value in quiet(ours).items() if not key.startswith("ref/")}
        found = {key: value for key, value in quiet(theirs).items() if not key.startswith("ref/")}
        assert found.keys() == want.keys()
        for key, value in want.items():
            assert found[key] == pytest.approx(value, rel=1e-4, abs=1e-5), key
    assert local.metrics()[1]["actor/kl_loss"] > 1e-4  # the comparison is not one of zeros

    with serving(tiny_model(tmp_path / "other", seed=5)) as (_, other):
        changed = [f"actor_rollout_ref.ref.url={other}", "trainer.total_training_steps=3"]
        resumed = launch("served", *changed)
        assert resumed.wait() == 2, resumed.text()
        assert "is not the one that this run began with" in resumed.text()


@pytest.mark.process
def test_service_ends_when_its_model_does(tiny_qwen2):
    import psutil

    with serving(tiny_qwen2) as (process, url):
        children = psutil.Process(process.pid).children(recursive=True)
        (model,) = [one for one in children if "spawn_main" in " ".join(one.cmdline())]
        model.kill()
        from verlite.engine import reference_client
        from verlite.spec.roles import ReferenceServiceSpec

        given = ReferenceServiceSpec(url=(url,), timeout_s=5, deadline_s=1)
        with pytest.raises(reference_client.ReferenceUnavailable):
            ids = np.array([5, 6, 7], np.int32)
            reference_client.log_probs(given, [ids], [2], 1.0, "m")
        assert process.wait(60) == 1
