"""Whole runs of agents on the search recipe's little world, with a real retriever that dies, comes back, or was never there."""

import json
import re
import signal
import threading
import time

import pytest
import torch
from transformers import AutoModelForCausalLM

from recipes.search import make
from tests.envs.retriever import Retriever, free_port
from tests.trainer.runs import Launch, quiet
from verlite.config.schema import ModelConfig
from verlite.engine.folder import load_tokenizer

pytestmark = pytest.mark.timeout(600)

# Differ between equal runs of agents: clocks, what a worker that was started anew has to ask for again, and the last digit of the engine's
# float32 log-probs, since who shares a batch depends on when tools answer.
OF_THE_MOMENT = (
    "env/tool_latency_s",
    "env/tool_retries",
    "env/cache_hit",
    "rollout/slowest",
    "training/log_prob_gap",
    "training/rollout_",
)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """The recipe's data, and its model after a minute's worth of demonstrations: it searches, answers, and makes mistakes."""
    folder = tmp_path_factory.mktemp("world")
    make.make_data(folder, seed=0)
    make.make_model(folder / "model", seed=0)
    teach(folder)
    return folder


def teach(folder, steps=40, rows=16):
    """Next-token training on the recipe's demonstrations, observations included: enough to know how turns look."""
    import pyarrow.parquet as pq

    torch.manual_seed(0)
    path = str(folder / "model")
    tokenizer, model = (
        load_tokenizer(ModelConfig(path=path)),
        AutoModelForCausalLM.from_pretrained(path),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    shown = [
        row["prompt"] + row["response"]
        for row in pq.read_table(folder / "warm_up.parquet").to_pylist()[: steps * rows]
    ]
    for start in range(0, len(shown), rows):
        batch = tokenizer(shown[start : start + rows], return_tensors="pt", padding=True)
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        model(**batch, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(path)


class Facts(Retriever):
    """Knows the recipe's world: finds the fact that is asked for, and another one of the same name."""

    known = make.facts(0)

    def __init__(self, port: int = 0):
        super().__init__(port)
        self.answer = lambda body: (
            200,
            {"result": [self.found(query)[: body["topk"]] for query in body["queries"]]},
        )

    def found(self, query):
        name = next((name for name in self.known if name in query), "Brifin")
        kinds = sorted(self.known[name], key=lambda kind: (kind not in query, kind))
        return [
            {"document": {"contents": make.passage(name, kind, self.known[name][kind])}}
            for kind in kinds
        ]


def launch(tmp_path, name, world, url, *overrides, before=""):
    base = [
        "--config-name=search_demo",
        f"data.train_files={world}/train.parquet",
        f"data.val_files={world}/test.parquet",
        f"actor_rollout_ref.model.path={world}/model",
        f"retriever.url={url}",
        "data.train_batch_size=4",
        "data.val_max_samples=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.rollout.n=4",
        "trainer.total_training_steps=3",
        "trainer.test_freq=3",
        "trainer.val_before_train=false",
        "trainer.rollouts_per_step=-1",
        "trainer.save_freq=-1",
        "trainer.export_hf=false",
    ]
    return Launch(tmp_path / name, [*base, *overrides], tmp_path / f"{name}.log", before)


def numbers(run) -> list[dict]:
    return [
        {key: value for key, value in quiet(line).items() if not key.startswith(OF_THE_MOMENT)}
        for line in run.metrics()
    ]


def samples(run, step) -> list[dict]:
    return [
        json.loads(line)
        for line in (run.run_dir / "rollouts" / f"step_{step}.jsonl").read_text().splitlines()
    ]


@pytest.fixture(scope="module")
def undisturbed(world, tmp_path_factory):
    """A run that nothing happens to, which may not lose a single sample."""
    with Facts() as server:
        run = launch(
            tmp_path_factory.mktemp("undisturbed"),
            "whole",
            world,
            server.url,
            "actor_rollout_ref.rollout.max_error_rate=0",
        )
        assert run.wait() == 0, run.text()
        run.asked = [query for body in server.requests for query in body["queries"]]
    return run


def test_an_agents_run(undisturbed):
    run = undisturbed
    assert [line["step"] for line in run.metrics()] == [1, 2, 3]
    for line in run.metrics():
        assert 1 <= line["env/number_of_actions/mean"] <= line["env/number_of_actions/max"] <= 3
        assert sum(
            line[f"env/status/{name}"] for name in ("done", "max_turns", "length", "error")
        ) == pytest.approx(1)
        assert (
            line["env/status/error"]
            == line["env/tool_error_rate"]
            == 0
            < line["env/trainable_token_frac"]
            <= 1
        )
        assert line["training/log_prob_gap"] < 1e-4 if "training/log_prob_gap" in line else True
    last = run.metrics()[-1]
    assert any(key.startswith("val-core/verlite/facts/") for key in last)
    assert "val-aux/verlite/facts/number_of_valid_search/mean@1" in last
    searches = 0
    for step in (1, 2, 3):
        kept = samples(run, step)
        assert len(kept) == 16
        line = run.metrics()[step - 1]
        called = [info for sample in kept for info in sample["turn_infos"] if info.get("called")]
        assert line["env/number_of_valid_search"] == len(called) / 16
        searches += len(called)
        for sample in kept:
            told = [text for who, text in sample["transcript"] if who == "tool"]
            said = "".join(text for who, text in sample["transcript"] if who == "model")
            assert (
                said == sample["response"] and sample["trained_tokens"] <= sample["response_tokens"]
            )
            assert all(
                text.startswith(("\n\n<information>", "\nMy previous action")) for text in told
            )
            for info in sample["turn_infos"]:
                if info["action"] == "search":
                    assert info["query"] in run.asked
    assert searches > 0, "no power without searches"


def test_a_killed_run_of_agents_resumes_to_the_same_numbers(undisturbed, world, tmp_path):
    with Facts() as server:
        options = ["actor_rollout_ref.rollout.max_error_rate=0", "trainer.save_freq=1"]
        killed = launch(
            tmp_path,
            "killed",
            world,
            server.url,
            *options,
            before=at_step(2, "os.kill(os.getpid(), signal.SIGKILL)"),
        )
        killed.wait()
        assert [line["step"] for line in killed.metrics()] == [1]
        killed.assert_nothing_left()
        resumed = launch(tmp_path, "killed", world, server.url, *options)
        assert resumed.wait() == 0, resumed.text()
    assert "resumed from" in resumed.text() and numbers(resumed) == numbers(undisturbed)
    for sample, other in zip(samples(resumed, 3), samples(undisturbed, 3), strict=True):
        assert (sample["transcript"], sample["score"], sample["status"]) == (
            other["transcript"],
            other["score"],
            other["status"],
        )


def at_step(step, action):
    """A driver that does something when it is about to log a step."""
    return f"""
import os, pathlib, signal, time
from verlite.trainer.tracking import Tracking
log = Tracking.log
def faulty(self, step, metrics):
    if step == {step}:
        {action}
    log(self, step, metrics)
Tracking.log = faulty
"""


def wait_for_the_end_of(server, folder):
    """For a driver: say that the step is over, and wait until the retriever was shut down in between."""
    action = f"pathlib.Path({str(folder)!r}, 'now').touch()\n        while not pathlib.Path({str(folder)!r}, 'gone').exists(): time.sleep(0.02)"

    def end():
        while not (folder / "now").exists():
            time.sleep(0.02)
        server.__exit__()
        (folder / "gone").touch()

    return at_step(1, action), threading.Thread(target=end, daemon=True)


def disturbed(tmp_path, world, *overrides):
    """A run whose retriever dies after the first step."""
    server = Facts().__enter__()
    before, killer = wait_for_the_end_of(server, tmp_path)
    killer.start()
    # One sample that loses its search is one too many; the worker's cache is off, so that there is something to lose.
    options = [
        "actor_rollout_ref.rollout.max_error_rate=0",
        "retriever.deadline_s=2",
        "retriever.cache_size=0",
    ]
    return server, launch(
        tmp_path, "disturbed", world, server.url, *options, *overrides, before=before
    )


def test_a_retriever_that_dies_ends_the_run_with_its_name(world, tmp_path):
    server, run = disturbed(tmp_path, world)
    assert run.wait() == 1, run.text()
    assert [line["step"] for line in run.metrics()] == [1]
    assert len(re.findall("(?m)^error", run.text())) == 1 and "Traceback" not in run.text(), (
        run.text()
    )
    said = " ".join(run.text().split())
    assert (
        "actor_rollout_ref.rollout.max_error_rate=0" in said
        and f"127.0.0.1:{server.port}" in said
        and "ToolError" in said
    )
    run.assert_nothing_left()


def wait_for_the_outage(run):
    deadline = time.monotonic() + 120
    while "lost their tools" not in run.text():
        assert run.process.poll() is None and time.monotonic() < deadline, run.text()
        time.sleep(0.1)


def test_a_retriever_that_comes_back_costs_time_and_no_numbers(undisturbed, world, tmp_path):
    server, run = disturbed(tmp_path, world, "retriever.outage_wait_s=60")
    wait_for_the_outage(run)
    with Facts(server.port):
        assert run.wait() == 0, run.text()
    assert "the tools recovered" in " ".join(run.text().split())
    assert numbers(run) == numbers(undisturbed)


def test_a_stop_during_an_outage_loses_nothing(undisturbed, world, tmp_path):
    """A scheduler that ends a waiting run finds a checkpoint of its last whole step, and the run goes on from there."""
    server, run = disturbed(tmp_path, world, "retriever.outage_wait_s=600")
    wait_for_the_outage(run)
    run.process.send_signal(signal.SIGTERM)
    assert run.wait(60) == 75, run.text()
    assert [line["step"] for line in run.metrics()] == [1] and (
        run.run_dir / "global_step_1"
    ).is_dir()
    run.assert_nothing_left()
    with Facts() as again:
        resumed = launch(
            tmp_path, "disturbed", world, again.url, "actor_rollout_ref.rollout.max_error_rate=0"
        )
        assert resumed.wait() == 0, resumed.text()
    assert numbers(resumed) == numbers(undisturbed)


def test_without_a_retriever_no_run_starts(world, tmp_path):
    url = f"http://127.0.0.1:{free_port()}/retrieve"
    began = time.monotonic()
    run = launch(tmp_path, "refused", world, url)
    assert run.wait() == 2 and time.monotonic() - began < 60
    said = " ".join(run.text().split())
    assert said.startswith(f"error: the retriever at {url} does not answer"), said
    assert (
        "verlite serve retriever" in said
        and "Traceback" not in said
        and not (run.run_dir / "logs").exists()
    )
    run.assert_nothing_left()


CHAT = (
    "{% if tools %}{{ tools[0].function.name }}: {% endif %}{% for m in messages %}"
    "{% if m.role == 'user' %}{{ m.content }}{% elif m.role == 'tool' %}{{ '\\n' }}<information>{{ m.content }}</information>{{ '\\n' }}"
    "{% else %}{{ m.content }}<eos>{% endif %}{% endfor %}"
)


def test_a_calculator_in_a_chat(world, tmp_path):
    """The model has never seen a call: what it writes is an answer or is cut off. The template has the tool in the prompt."""
    options = [
        "env.name=calculator",
        f"actor_rollout_ref.model.custom_chat_template={json.dumps(CHAT)}",
        "trainer.total_training_steps=1",
        "trainer.test_freq=-1",
        "data.max_start_length=30",
    ]
    run = launch(tmp_path, "calculator", world, "http://127.0.0.1:9/retrieve", *options)
    assert run.wait() == 0, run.text()
    (line,) = run.metrics()
    assert (
        line["env/status/error"] == 0 and line["env/status/done"] + line["env/status/length"] == 1
    )
    assert all(sample["prompt"].startswith("calculator: Which") for sample in samples(run, 1))


def test_without_do_search_samples_are_single_turns(world, tmp_path):
    run = launch(
        tmp_path,
        "single",
        world,
        "http://127.0.0.1:9/retrieve",
        "do_search=false",
        "trainer.total_training_steps=1",
        "trainer.test_freq=-1",
    )
    assert run.wait() == 0, run.text()
    (line,) = run.metrics()
    assert line["num_turns/max"] == 1 and not any(key.startswith("env/") for key in line)
    assert all("transcript" not in sample for sample in samples(run, 1))
