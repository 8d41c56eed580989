"""Whole runs with a teacher: the start of the policy as teacher is a reference in the KL loss."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.models import tiny_model
from tests.trainer.runs import Launch, one_thread, quiet, samples_of, write_reward, write_sums
from tests.trainer.test_reference_service import serving

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]
TEACHER = "distillation.teacher_models.teacher_model."
LOSS = "distillation.distillation_loss."


@pytest.fixture(scope="module")
def base(tmp_path_factory, tiny_qwen2):
    """Two ranks, and two updates in each of two steps, of which all but the first differ from the
    teacher."""
    folder = tmp_path_factory.mktemp("sums")
    reward = write_reward(folder / "reward.py", "return sum(c.isdigit() for c in solution_str)")
    return [
        f"data.train_files={write_sums(folder / 'train.parquet', 16)}",
        f"custom_reward_function.path={reward}",
        f"actor_rollout_ref.model.path={tiny_qwen2}",
        "data.train_batch_size=4",
        "data.max_prompt_length=8",
        "data.max_response_length=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=3",
        "actor_rollout_ref.actor.optim.lr=3e-2",
        "actor_rollout_ref.actor.optim.eps=1e-1",
        "actor_rollout_ref.rollout.name=hf",
        "actor_rollout_ref.rollout.n=2",
        "actor_rollout_ref.rollout.temperature=0.8",
        "algorithm.adv_estimator=grpo",
        "trainer.n_gpus_per_node=2",
        "trainer.total_training_steps=2",
        "trainer.save_freq=-1",
        "trainer.device=cpu",
    ]


DISTILLED = ["distillation.enabled=true", f"{LOSS}distillation_loss_coef=0.5"]


@pytest.fixture(scope="module")
def reference(tmp_path_factory, base):
    """The run with KL to the reference in the loss."""
    kl = ["use_kl_loss=true", "kl_loss_coef=0.5", "kl_loss_type=k3"]
    options = [*base, *(f"actor_rollout_ref.actor.{setting}" for setting in kl)]
    return finished(tmp_path_factory.mktemp("reference"), options)


def finished(folder, options):
    with pytest.MonkeyPatch.context() as patch:
        one_thread(patch)
        run = Launch(folder / "run", options, folder / "run.log", forked=True)
        assert run.wait() == 0, run.text()
    return run


def check_same(run, reference):
    """Check that losses, gradients and samples are those of the reference in the KL loss."""
    assert len(run.metrics()) == len(reference.metrics()) == 2
    for line, other in zip(run.metrics(), reference.metrics(), strict=True):
        other["distillation/loss"] = other.pop("actor/kl_loss")
        other.pop("actor/kl_coef")
        named = ("actor/", "critic/", "distillation/loss", "response_length/")
        want = {key: value for key, value in quiet(other).items() if key.startswith(named)}
        assert {"actor/grad_norm", "critic/score/mean"} <= want.keys()
        for key, value in want.items():
            assert line[key] == pytest.approx(value, rel=1e-4, abs=1e-5), key
    assert reference.metrics()[1]["actor/kl_loss"] > 1e-4  # the comparison is not one of zeros


@pytest.mark.parametrize(
    "options",
    [
        ["actor_rollout_ref.ref.log_prob_use_dynamic_bsz=true"],
        ["trainer.mode=pipelined", "cluster.component_placement={rollout: 0, actor: 1}"],
        [
            "trainer.mode=async",
            "async_training.max_age=0",
            *("cluster.component_placement={rollout: 0, actor: 1}",),
        ],
    ],
    ids=["sync", "pipelined", "async"],
)
def test_own_start_as_teacher_is_the_kl_loss(tmp_path, base, reference, tiny_qwen2, options):
    run = finished(tmp_path, [*base, *DISTILLED, f"{TEACHER}model_path={tiny_qwen2}", *options])
    check_same(run, reference)
    assert "distillation from" in run.text()


def test_teacher_behind_a_service(tmp_path, base, reference, tiny_qwen2):
    with serving(tiny_qwen2) as (_, url):
        options = [*base, *DISTILLED, f"{TEACHER}url={url}", "trainer.save_freq=2"]
        run = finished(tmp_path, options)
    check_same(run, reference)
    assert f"teacher by the service at {url}" in run.text()
    assert not list((run.run_dir / "logs").glob("teacher_*"))
    with serving(tiny_model(tmp_path / "other", seed=5)) as (_, other):
        options += [f"{TEACHER}url={other}", "trainer.total_training_steps=3"]
        resumed = Launch(tmp_path / "run", options, tmp_path / "again.log", forked=True)
        assert resumed.wait() == 2, resumed.text()
        assert "is not the one that this run began with" in resumed.text()


@pytest.mark.parametrize("place", ["worker", "service"])
def test_teacher_reads_its_own_prompts(tmp_path, base, tiny_qwen2, place):
    """Its log-probs of the policy's responses are those after the teacher's prompt: of a plain
    forward pass, with the answer in front of the question."""
    file = tmp_path / "hinted.parquet"
    rows = pq.read_table(write_sums(file, 16)).to_pylist()
    for row in rows:
        question = row["prompt"][0]["content"]
        hinted = f"{row['reward_model']['ground_truth']}+{question}"
        row["hinted"] = [{"role": "user", "content": hinted}]
    pq.write_table(pa.Table.from_pylist(rows), file)
    options = [
        *(*base, *DISTILLED, f"data.train_files={file}", "data.teacher_prompt_key=hinted"),
        *("trainer.rollouts_per_step=-1", f"{LOSS}loss_mode=k2"),
    ]
    if place == "worker":
        run = finished(tmp_path, [*options, f"{TEACHER}model_path={tiny_qwen2}"])
    else:
        apart = ["trainer.mode=pipelined", "cluster.component_placement={rollout: 0, actor: 1}"]
        with serving(tiny_qwen2) as (_, url):
            run = finished(tmp_path, [*options, f"{TEACHER}url={url}", *apart])
    model = AutoModelForCausalLM.from_pretrained(tiny_qwen2)
    tokenizer = AutoTokenizer.from_pretrained(tiny_qwen2)
    steps = samples_of(run)
    assert [len(steps[step]) for step in (1, 2)] == [8, 8]
    for record in (*steps[1], *steps[2]):
        ids = record["tokens"]["id"]
        prompts = [f"{record['ground_truth']}+{record['prompt']}", record["prompt"]]
        hinted, plain = (log_probs(model, tokenizer.encode(text), ids) for text in prompts)
        assert record["tokens"]["teacher_log_prob"] == pytest.approx(hinted, abs=2e-4)
        assert hinted != pytest.approx(plain, abs=1e-3)  # the prompt matters


def log_probs(model, prompt, response):
    """Return the log-probs of a response, as floats."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    table = (logits.double() / 0.8).log_softmax(-1)
    return table[range(len(response)), response].tolist()
