"""Whole runs of multi-turn agents on the search recipe's demo data.

The retriever is a real server, which the tests shut down and start again.
"""

import json
import re
import signal
import threading

import pytest
import torch
from transformers import AutoModelForCausalLM

from recipes.search import make
from tests.envs.retriever import Retriever
from tests.trainer.runs import Launch, quiet, wait_for, words
from verlite.engine.folder import load_tokenizer
from verlite.spec.roles import ModelSpec

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

# Metrics that differ between equal agent runs: times, tool calls that a restarted worker repeats
# because its cache is empty, and the last digit of the engine's float32 log-probs, because batches
# depend on when tools answer.
TIME_DEPENDENT = (
    "env/tool_latency_s",
    "env/tool_retries",
    "env/cache_hit",
    "rollout/slowest",
    "training/log_prob_gap",
    "training/rollout_",
)
UNREACHABLE = "http://127.0.0.1:9/retrieve"
NO_ERRORS = "actor_rollout_ref.rollout.max_error_rate=0"
"""With this setting one failed search ends the run, so a finished run has no failed search."""


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """Return a folder with the recipe's data and a model that searches and makes mistakes."""
    folder = tmp_path_factory.mktemp("demo")
    make.make_data(folder, seed=0)
    make.make_model(folder / "model", seed=0)
    teach(folder)
    return folder


def teach(folder, steps=40, rows=16):
    """Train on the recipe's demonstrations, observations included, to learn the format."""
    import pyarrow.parquet as pq

    torch.manual_seed(0)
    path = str(folder / "model")
    tokenizer = load_tokenizer(ModelSpec(path=path))
    model = AutoModelForCausalLM.from_pretrained(path)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    examples = pq.read_table(folder / "warm_up.parquet").to_pylist()[: steps * rows]
    texts = [row["prompt"] + row["response"] for row in examples]
    for start in range(0, len(texts), rows):
        batch = tokenizer(texts[start : start + rows], return_tensors="pt", padding=True)
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        model(**batch, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(path)


class Facts(Retriever):
    """A retriever that returns the requested fact, and another fact about the same name."""

    known = make.make_facts(0)

    def __init__(self, port: int = 0):
        super().__init__(port)
        self.answer = lambda body: (
            200,
            {"result": [self.find(query)[: body["topk"]] for query in body["queries"]]},
        )

    def find(self, query):
        name = next((name for name in self.known if name in query), "Brifin")
        kinds = sorted(self.known[name], key=lambda kind: (kind not in query, kind))
        passages = [make.passage(name, kind, self.known[name][kind]) for kind in kinds]
        return [{"document": {"contents": passage}} for passage in passages]


def launch(tmp_path, name, demo, url, *overrides, before=""):
    base = [
        "--config-name=search_demo",
        f"data.train_files={demo}/train.parquet",
        f"data.val_files={demo}/test.parquet",
        f"actor_rollout_ref.model.path={demo}/model",
        f"retriever.url={url}",
        "data.train_batch_size=4",
        "data.val_max_samples=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.rollout.n=4",
        "trainer.total_training_steps=4",
        "trainer.test_freq=4",
        "trainer.val_before_train=false",
        "trainer.rollouts_per_step=-1",
        "trainer.save_freq=-1",
        "trainer.export_hf=false",
    ]
    log = tmp_path / f"{name}.log"
    return Launch(tmp_path / name, [*base, *overrides], log, before, forked=True)


def steps_of(run):
    return [line["step"] for line in run.metrics()]


def numbers(run) -> list[dict]:
    """Return the metrics that must be equal in equal runs."""
    return [
        {key: value for key, value in quiet(line).items() if not key.startswith(TIME_DEPENDENT)}
        for line in run.metrics()
    ]


def samples(run, step) -> list[dict]:
    lines = (run.run_dir / "rollouts" / f"step_{step}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def undisturbed(demo, tmp_path_factory):
    """Return a finished run whose retriever always answered."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with Facts() as server:
        run = launch(folder, "whole", demo, server.url, NO_ERRORS)
        assert run.wait() == 0, run.text()
        run.queries = [query for body in server.requests for query in body["queries"]]
    return run


def test_metrics_and_samples_of_an_agent_run(undisturbed):
    run = undisturbed
    assert steps_of(run) == [1, 2, 3, 4]
    for line in run.metrics():
        assert 1 <= line["env/number_of_actions/mean"] <= line["env/number_of_actions/max"] <= 3
        statuses = [line[f"env/status/{s}"] for s in ("done", "max_turns", "length", "error")]
        assert sum(statuses) == pytest.approx(1)
        assert line["env/status/error"] == 0
        assert line["env/tool_error_rate"] == 0
        assert 0 < line["env/trainable_token_frac"] <= 1
        assert line.get("training/log_prob_gap", 0) < 1e-4
    last = run.metrics()[-1]
    assert any(key.startswith("val-core/verlite/facts/") for key in last)
    assert "val-aux/verlite/facts/number_of_valid_search/mean@1" in last
    searches = 0
    for line in run.metrics():
        kept = samples(run, line["step"])
        assert len(kept) == 16
        infos = [info for sample in kept for info in sample["turn_infos"]]
        called = [info for info in infos if info.get("called")]
        assert line["env/number_of_valid_search"] == len(called) / 16
        searches += len(called)
        assert all(info["query"] in run.queries for info in infos if info["action"] == "search")
        for sample in kept:
            check_transcript(sample)
    assert searches > 0, "the model never searched, so the checks above prove nothing"


def check_transcript(sample):
    observations = [text for author, text in sample["transcript"] if author == "tool"]
    written = "".join(text for author, text in sample["transcript"] if author == "model")
    assert written == sample["response"]
    assert sample["trained_tokens"] <= sample["response_tokens"]
    for text in observations:
        assert text.startswith(("\n\n<information>", "\nMy previous action"))


def pause_when_logging(*steps, folder):
    """Return code for the driver: at these steps, wait until the test continues the run.

    It creates the file paused_STEP before it logs the step, and waits for continue_STEP.
    """
    return f"""
import pathlib, time
from verlite.trainer.tracking import Tracking
log = Tracking.log
def pausing(self, step, metrics):
    if step in {steps}:
        folder = pathlib.Path({str(folder)!r})
        (folder / f"paused_{{step}}").touch()
        while not (folder / f"continue_{{step}}").exists():
            time.sleep(0.02)
    log(self, step, metrics)
Tracking.log = pausing
"""


def kill_when_logging(step):
    """Return code for the driver: kill itself before it logs this step."""
    return f"""
import os, signal
from verlite.trainer.tracking import Tracking
log = Tracking.log
def killing(self, step, metrics):
    if step == {step}:
        os.kill(os.getpid(), signal.SIGKILL)
    log(self, step, metrics)
Tracking.log = killing
"""


def shut_down_after(step, server, run, folder):
    """Shut the retriever down between this step and the next."""
    wait_for((folder / f"paused_{step}").exists, run, seconds=240)
    server.__exit__()
    (folder / f"continue_{step}").touch()


def wait_for_outage(run, number=1):
    """Wait until the run has reported its `number`-th outage."""
    wait_for(lambda: words(run).count("lost their tools") >= number, run)


def test_outages_a_stop_and_a_kill_change_no_numbers(undisturbed, demo, tmp_path):
    """One run of four steps in three processes.

    First process: the retriever dies after step 1 and comes back, dies again after step 2, and a
    scheduler sends SIGTERM while the run waits. The second process is killed between the checkpoint
    of step 3 and its line in metrics.jsonl. The third finishes.
    """
    no_cache = ["retriever.deadline_s=2", "retriever.cache_size=0"]
    pause = pause_when_logging(1, 2, folder=tmp_path)
    server = Facts().__enter__()
    options = [NO_ERRORS, *no_cache, "retriever.outage_wait_s=600"]
    first = launch(tmp_path, "run", demo, server.url, *options, before=pause)
    shut_down_after(1, server, first, tmp_path)
    wait_for_outage(first)
    again = Facts(server.port).__enter__()
    shut_down_after(2, again, first, tmp_path)
    assert "the tools recovered" in words(first)
    wait_for_outage(first, 2)
    first.process.send_signal(signal.SIGTERM)
    assert first.wait(60) == 75, first.text()
    assert numbers(first) == numbers(undisturbed)[:2]
    assert (first.run_dir / "global_step_2").is_dir()
    first.assert_nothing_left()

    with Facts() as server:
        options = [NO_ERRORS, "trainer.save_freq=1"]
        kill = kill_when_logging(3)
        second = launch(tmp_path, "run", demo, server.url, *options, before=kill)
        second.wait()
        assert steps_of(second) == [1, 2]
        second.assert_nothing_left()
        third = launch(tmp_path, "run", demo, server.url, *options)
        assert third.wait() == 0, third.text()
    assert "resumed from" in third.text()
    assert numbers(third) == numbers(undisturbed)
    for step in (3, 4):
        for sample, other in zip(samples(third, step), samples(undisturbed, step), strict=True):
            for key in ("transcript", "score", "status"):
                assert sample[key] == other[key]


def test_a_dead_retriever_ends_the_run_and_is_named(demo, tmp_path):
    """The worker's cache is off, so every search reaches the retriever."""
    options = [NO_ERRORS, "retriever.deadline_s=2", "retriever.cache_size=0"]
    pause = pause_when_logging(1, folder=tmp_path)
    server = Facts().__enter__()
    run = launch(tmp_path, "run", demo, server.url, *options, before=pause)
    killer = threading.Thread(target=shut_down_after, args=(1, server, run, tmp_path), daemon=True)
    killer.start()
    assert run.wait() == 1, run.text()
    assert steps_of(run) == [1]
    assert len(re.findall("(?m)^error", run.text())) == 1, run.text()
    assert "Traceback" not in run.text(), run.text()
    for text in (NO_ERRORS, f"127.0.0.1:{server.port}", "ToolError"):
        assert text in words(run)
    run.assert_nothing_left()


CHAT = (
    "{% if tools %}{{ tools[0].function.name }}: {% endif %}{% for m in messages %}"
    "{% if m.role == 'user' %}{{ m.content }}"
    "{% elif m.role == 'tool' %}{{ '\\n' }}<information>{{ m.content }}</information>{{ '\\n' }}"
    "{% else %}{{ m.content }}<eos>{% endif %}{% endfor %}"
)


def test_a_calculator_environment_puts_its_tool_into_the_prompt(demo, tmp_path):
    """The model was not trained on tool calls, so it only answers or is truncated."""
    options = [
        "env.name=calculator",
        f"actor_rollout_ref.model.custom_chat_template={json.dumps(CHAT)}",
        "trainer.total_training_steps=1",
        "trainer.test_freq=-1",
        "data.max_start_length=30",
    ]
    run = launch(tmp_path, "calculator", demo, UNREACHABLE, *options)
    assert run.wait() == 0, run.text()
    (line,) = run.metrics()
    assert line["env/status/error"] == 0
    assert line["env/status/done"] + line["env/status/length"] == 1
    assert all(sample["prompt"].startswith("calculator: Which") for sample in samples(run, 1))


def test_scores_can_be_the_rewards_of_the_environment(demo, tmp_path):
    options = [
        "env.name=tests.envs.rewarding:Letters",
        "env.kwargs={each: 0.25}",
        "custom_reward_function.path=verlite.rewards.environment",
        "trainer.total_training_steps=1",
        "trainer.test_freq=-1",
    ]
    run = launch(tmp_path, "rewards", demo, UNREACHABLE, *options)
    assert run.wait() == 0, run.text()
    assert "ground-truth answers" not in run.text()
    found = samples(run, 1)
    assert len({sample["score"] for sample in found}) > 1
    for sample in found:
        letters = sum(info["letters"] for info in sample["turn_infos"])
        assert sample["score"] == pytest.approx(letters / 4)


def test_without_do_search_samples_have_one_turn(demo, tmp_path):
    options = ["do_search=false", "trainer.total_training_steps=1", "trainer.test_freq=-1"]
    run = launch(tmp_path, "single", demo, UNREACHABLE, *options)
    assert run.wait() == 0, run.text()
    (line,) = run.metrics()
    assert line["num_turns/max"] == 2
    assert not any(key.startswith("env/") for key in line)
    assert all("transcript" not in sample for sample in samples(run, 1))
