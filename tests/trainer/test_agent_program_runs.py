"""Whole runs whose samples are those of an agent program."""

import json
import sys

import pytest

from recipes.agent import make
from tests.trainer.runs import Launch

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

AGENT = """
import json, os, sys, urllib.request
task = json.load(sys.stdin)
url, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
def ask(messages):
    headers = {"Content-Type": "application/json", "Authorization": "Bearer " + key}
    body = json.dumps({"messages": messages, "max_tokens": 4}).encode()
    request = urllib.request.Request(url + "/chat/completions", body, headers)
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]
messages = [*task["prompt"], ask(task["prompt"])]
if task["extra_info"]["index"] % 4 == 0:
    sys.exit("this task fails")
if task["extra_info"]["index"] % 4 == 1:
    ask([{"role": "user", "content": "9"}])
messages += [{"role": "user", "content": "?"}]
messages.append(ask(messages))
print(json.dumps({"score": len(messages[-1]["content"]) / 4, "first": messages[1]["content"]}))
"""
"""Asks twice. Every fourth task fails, and another fourth has a second conversation of one turn."""


KILLS = """
import atexit, os, signal, time
folder = {folder!r}
atexit.register(lambda: open(os.path.join(folder, "ended-" + str(os.getpid())), "w").close())
def kill_gateway():
    "Once, when other programs have ended: the process of the gateway, whose grandchild this is."
    while sum(name.startswith("ended") for name in os.listdir(folder)) < 4:
        time.sleep(0.05)
    try:
        os.close(os.open(os.path.join(folder, "gone"), os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    with open("/proc/" + str(os.getppid()) + "/stat") as stat:
        os.kill(int(stat.read().rpartition(")")[2].split()[1]), signal.SIGKILL)
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("built")
    make.make_data(folder, seed=0)
    make.make_model(folder / "model", seed=0)
    (folder / "agent.py").write_text(AGENT)
    return folder


def launch(built, tmp_path, *overrides):
    base = [
        "--config-name=agent_demo",
        f"agent.command={sys.executable} {built}/agent.py",
        f"data.train_files={built}/train.parquet",
        f"data.val_files={built}/test.parquet",
        f"actor_rollout_ref.model.path={built}/model",
        "data.train_batch_size=8",
        "data.shuffle=false",
        "data.val_max_samples=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "actor_rollout_ref.rollout.n=2",
        "actor_rollout_ref.rollout.max_error_rate=0.3",
        "trainer.total_training_steps=2",
        "trainer.test_freq=2",
        "trainer.val_before_train=false",
        "trainer.rollouts_per_step=-1",
        "trainer.save_freq=-1",
        "trainer.export_hf=false",
    ]
    run = Launch(tmp_path / "run", [*base, *overrides], tmp_path / "log", forked=True)
    assert run.wait() == 0, run.text()
    return run


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_samples_of_a_program_are_trained(built, tmp_path, mode):
    run = launch(built, tmp_path, f"trainer.mode={mode}", "async_training.max_age=0")
    first, last = run.metrics()
    for line in (first, last):
        assert line["env/status/error"] == 0.25
        # 3 of 4 tasks ask twice, and one of these has another conversation.
        assert line["agent/requests"] == (1 + 3 + 2 + 2) / 4
        assert line["agent/branches"] == (1 + 2 + 1 + 1) / 4
        assert line["agent/new_roots"] == 0.25 and line["agent/aborted"] == 0
        assert line["agent/repeated_token_frac"] == 0  # a sub-agent shares nothing
        assert 0 < line["training/log_prob_gap"] < 1e-4
        assert line["num_turns/max"] == 6 and line["env/ratio_of_valid_action"] == 1
    lines = (run.run_dir / "rollouts" / "step_1.jsonl").read_text().splitlines()
    samples = [json.loads(line) for line in lines]
    assert len(samples) == 16
    for sample in samples:
        if sample["status"] == "error":
            assert sample["score"] is None
            assert sample["error"] == "ProgramError: it ended with exit code 1: this task fails"
            continue
        (one, other, *_) = [text for author, text in sample["transcript"] if author == "model"]
        assert sample["reward_parts"]["first"] == one
        assert sample["score"] == pytest.approx(len(other) / 4)
        assert "?" in sample["transcript"][1][1]
    run.assert_nothing_left()


def test_a_killed_gateway_costs_no_sample(built, tmp_path):
    """The samples of its step are drawn again, with the tokens of a run that nothing disturbed, and
    trained once."""
    for name in ("undisturbed", "killed"):
        (tmp_path / name).mkdir()
    first = launch(built, tmp_path / "undisturbed")
    killing = KILLS.format(folder=str(tmp_path)) + AGENT.replace(
        "messages +=", "if task['extra_info']['index'] == 6:\n    kill_gateway()\nmessages +=", 1
    )
    (tmp_path / "agent.py").write_text(killing)
    started = [f"agent.command={sys.executable} {tmp_path}/agent.py", "agent.preload=[]"]
    second = launch(built, tmp_path / "killed", *started)
    assert (tmp_path / "gone").exists()
    assert second.text().count("Started again in") == 1, second.text()
    assert [line["perf/engine_restarts"] for line in second.metrics()] == [1, 0]
    pair = [(run.run_dir / "rollouts" / "step_1.jsonl").read_text() for run in (first, second)]
    one, other = [list(map(json.loads, text.splitlines())) for text in pair]
    assert len(other) == 16
    for sample, again in zip(one, other, strict=True):
        for key in ("transcript", "score", "status", "error"):
            assert sample[key] == again[key]
    second.assert_nothing_left()


def test_a_reward_function_may_score_them(built, tmp_path):
    (tmp_path / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return float(len(extra_info['trajectory']['segments']))\n"
    )
    options = [
        "agent.reward=function",
        f"custom_reward_function.path={tmp_path}/reward.py",
        "reward.check_ground_truth=false",  # it needs a trajectory
    ]
    run = launch(built, tmp_path, *options)
    scores = [line["critic/score/mean"] for line in run.metrics()]
    assert scores == pytest.approx([(3 + 3 + 5) / 3] * 2)  # one of three has another conversation
