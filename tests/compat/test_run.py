"""A whole run with verl's keys and classes for verl: data set, tools, reward manager.

It starts as a user starts it, because the variable must reach workers and reward processes.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.models import tiny_model, tiny_tokenizer
from tests.trainer.runs import Launch, write_sums
from verlite.importing import VERL_VARIABLE

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

OWN = """
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import ToolResponse
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.workers.reward_manager import NaiveRewardManager, register


class Hinted(RLHFDataset):
    def _build_messages(self, example):
        messages = super()._build_messages(example)
        return [{**m, "content": self.config.hint + m["content"]} for m in messages]


class Adder(BaseTool):
    async def execute(self, instance_id, parameters, **kwargs):
        return ToolResponse(text=str(sum(parameters["terms"]))), 0.0, {}


@register("tripled")
class Tripled(NaiveRewardManager):
    def __call__(self, data, return_dict=False):
        result = super().__call__(data, return_dict=True)
        result["reward_tensor"] *= 3
        return result


def score(data_source, solution_str, ground_truth, extra_info, weight):
    return {"score": weight * extra_info["num_turns"], "turns": extra_info["num_turns"]}
"""
TOOLS = """
tools:
  - class_name: own_code.Adder
    config: {type: native}
    tool_schema:
      type: function
      function: {name: add, description: Add numbers., parameters: {type: object, properties: {}}}
"""
CHAT = (
    "{% if tools %}{{ tools[0].function.name }}: {% endif %}{% for m in messages %}"
    "{% if m.role == 'user' %}{{ m.content }}{% elif m.role == 'tool' %}[{{ m.content }}]"
    "{% else %}{{ m.content }}<eos>{% endif %}{% endfor %}"
)
CALL = '<tool_call>{"name": "add", "arguments": {"terms": [1, 2]}}</tool_call>'
ROLLOUT = "actor_rollout_ref.rollout"


def taught_model(folder: Path) -> str:
    """Return a tiny model that calls the tool once and then answers."""
    path = tiny_model(folder / "model")
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sums = [f"add: ?{a}+{b}=" for a, b in ((0, 0), (3, 4), (9, 1), (5, 7))]
    texts = [f"{text}{CALL}<eos>[3]3<eos>" for text in sums]
    batch = tokenizer(texts, return_tensors="pt")
    labels = batch["input_ids"].clone()
    labels[:, : len(sums[0])] = -100
    for _ in range(150):
        model(**batch, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(path)
    return path


def test_a_run_with_a_data_set_a_tool_and_a_manager_for_verl(tmp_path: Path) -> None:
    (tmp_path / "own_code.py").write_text(OWN)
    (tmp_path / "tools.yaml").write_text(TOOLS)
    own = f"{tmp_path}/own_code.py"
    overrides = [
        f"data.train_files={write_sums(tmp_path / 'train.parquet', 16)}",
        f"data.custom_cls.path={own}",
        "data.custom_cls.name=Hinted",
        "+data.hint=?",
        "data.train_batch_size=4",
        "data.max_prompt_length=40",
        "data.max_response_length=160",
        f"actor_rollout_ref.model.path={taught_model(tmp_path)}",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
        f"{ROLLOUT}.name=hf",
        f"{ROLLOUT}.n=2",
        f"{ROLLOUT}.multi_turn.enable=True",
        f"{ROLLOUT}.multi_turn.tool_config_path={tmp_path}/tools.yaml",
        f"{ROLLOUT}.multi_turn.max_assistant_turns=3",
        "reward_model.reward_manager=tripled",
        f"custom_reward_function.path={own}",
        "custom_reward_function.name=score",
        "+custom_reward_function.reward_kwargs.weight=0.5",
        "algorithm.adv_estimator=grpo",
        "trainer.n_gpus_per_node=1",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        "trainer.export_hf=false",
        "trainer.total_training_steps=1",
        "trainer.rollouts_per_step=-1",
    ]
    environment = {VERL_VARIABLE: "1", "PYTHONPATH": str(tmp_path)}
    log = tmp_path / "run.log"
    run = Launch(tmp_path / "run", overrides, log, environment=environment, forked=True)
    assert run.wait() == 0, run.text()
    (line,) = run.metrics()
    assert line["env/status/error"] == 0
    lines = (run.run_dir / "rollouts" / "step_1.jsonl").read_text().splitlines()
    samples: list[dict[str, Any]] = [json.loads(one) for one in lines]
    assert len(samples) == 8
    assert all(sample["prompt"].startswith("add: ?") for sample in samples)
    answers = [[text for who, text in s["transcript"] if who == "tool"] for s in samples]
    assert sum(any("3" in text for text in each) for each in answers) >= 4
    for sample in samples:
        turns = 1 + len(sample["transcript"])
        assert sample["score"] == 3 * 0.5 * turns


LOOP = """
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput, register


@register("twice")
class Twice(AgentLoopBase):
    async def run(self, sampling_params, **kwargs):
        prompt = await self.apply_chat_template(list(kwargs["raw_prompt"]))
        ids, mask = list(prompt), []
        for told in ([], self.tokenizer.encode("?", add_special_tokens=False)):
            ids, mask = ids + told, mask + [0] * len(told)
            asked = self.server_manager.generate(
                request_id="1", prompt_ids=ids, sampling_params={**sampling_params, "max_tokens": 4}
            )
            output = await asked
            ids, mask = ids + output.token_ids, mask + [1] * len(output.token_ids)
        limit = self.config.actor_rollout_ref.rollout.response_length
        return AgentLoopOutput(
            prompt_ids=prompt, response_ids=ids[len(prompt):][:limit], response_mask=mask[:limit],
            num_turns=4, reward_score=float(len(set(ids))), metrics={},
        )
"""


def test_a_run_with_an_agent_loop_for_verl(tmp_path: Path) -> None:
    (tmp_path / "loop_code.py").write_text(LOOP)
    (tmp_path / "loops.yaml").write_text("- {name: twice, _target_: loop_code.Twice}")
    model = tiny_model(tmp_path / "model")
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(model)
    overrides = [
        f"data.train_files={write_sums(tmp_path / 'train.parquet', 8)}",
        "data.train_batch_size=2",
        "data.max_prompt_length=40",
        "data.max_response_length=24",
        f"actor_rollout_ref.model.path={model}",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
        f"{ROLLOUT}.name=hf",
        f"{ROLLOUT}.n=2",
        f"{ROLLOUT}.multi_turn.enable=True",
        f"{ROLLOUT}.agent.agent_loop_config_path={tmp_path}/loops.yaml",
        f"{ROLLOUT}.agent.default_agent_loop=twice",
        f"{ROLLOUT}.agent.num_workers=2",
        "algorithm.adv_estimator=grpo",
        "trainer.n_gpus_per_node=1",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        "trainer.export_hf=false",
        "trainer.total_training_steps=2",
        "trainer.rollouts_per_step=-1",
    ]
    environment = {VERL_VARIABLE: "1", "PYTHONPATH": str(tmp_path)}
    log = tmp_path / "run.log"
    run = Launch(tmp_path / "run", overrides, log, environment=environment, forked=True)
    assert run.wait() == 0, run.text()
    lines = run.metrics()
    assert [line["env/status/error"] for line in lines] == [0, 0]
    assert all(line["training/rollout_probs_diff_max"] < 1e-3 for line in lines)
    written = (run.run_dir / "rollouts" / "step_2.jsonl").read_text().splitlines()
    for sample in map(json.loads, written):
        assert [who for who, _ in sample["transcript"]] == ["model", "tool", "model"]
        assert sample["score"] > 1
