"""Clients, tasks, and an environment whose tasks say what happens."""

import asyncio
import http.client
import json
import os
import time
from dataclasses import dataclass, field
from types import SimpleNamespace as Object
from urllib.parse import urlsplit


@dataclass
class EvalClientConfig:
    """Relays messages."""

    base_url: str
    api_key_var: str


@dataclass
class TrainClientConfig:
    """Renders messages itself."""

    base_url: str = ""
    api_key_var: str = ""
    renderer: dict | None = None
    renderer_model_name: str | None = None

    def __post_init__(self):
        if self.renderer["name"] != "bytes":
            raise ValueError(f"no renderer {self.renderer}")


@dataclass
class ModelContext:
    model: str
    client: object


@dataclass
class Data:
    """Of a task."""

    idx: int | None = None
    prompt: object = None
    system_prompt: str | None = None
    description: str | None = None
    name: str | None = None
    acts: list = field(default_factory=list)

    @classmethod
    def model_validate(cls, values):
        return cls(**values)

    def model_dump(self, mode, exclude_defaults):
        assert (mode, exclude_defaults) == ("json", True)
        values = {key: value for key, value in vars(self).items() if value not in (None, [])}
        return json.loads(json.dumps(values, default=vars))


class Task:
    def __init__(self, data, config=None):
        self.data = data

    @classmethod
    def data_type(cls):
        return Data


class Taskset:
    def __init__(self, rows, bounded=True):
        self.rows, self.bounded = rows, bounded

    @classmethod
    def task_type(cls):
        return Task

    def take(self, count):
        return Taskset(self.rows[:count])

    def __iter__(self):
        return iter(Task(Data(**row)) for row in self.rows)


class Environment:
    """Does what the task's `acts` say, one after the other."""

    def __init__(self, config):
        if config["taskset"]["id"] == "broken":
            raise ValueError("its file\nis not there")
        self.config = Object(taskset=Object(task=None), given=config)
        rows = [
            {"prompt": "How high?"},
            {"prompt": [Object(role="user", content="a"), Object(role="assistant", content="b")]},
            {"prompt": "c", "system_prompt": "Be brief."},
            {"name": "silent"},
        ]
        self.taskset = Taskset(rows, bounded=config["taskset"]["id"] != "endless")
        self.open = False

    def serving(self):
        return self

    async def __aenter__(self):
        self.open = True

    async def __aexit__(self, *error):
        self.open = False

    async def run_episode(self, task, context, *, on_discard):
        assert self.open and context.model == "policy"
        episode = Object(ok=True, errors=[], is_timeout=False, traces=[])
        for act, value in task.data.acts:
            if act == "stubborn":  # keeps the event loop, and does not give up
                try:
                    ask(context.client, "high?")
                except KeyError:
                    time.sleep(600)
            elif act == "ask":  # a dict: reward, and the trace's other fields
                text = await asyncio.to_thread(ask, context.client, value.pop("prompt", "high?"))
                reward = value.pop("reward", 0.0)
                config = Object(client=context.client)
                agent = Object(name="solver", trainable=True, config=config)
                trace = Object(
                    agent=agent, ok=True, errors=[], is_timeout=False, stop_condition="done",
                    calls=[text], reward=reward, rewards={"right": Object(value=reward)},
                    metrics={"letters": float(len(text))},
                )  # fmt: skip
                agent.trainable = value.pop("trainable", True)
                trace.errors = [Object(type=t, message=m) for t, m in value.pop("errors", [])]
                vars(trace).update(value)
                episode.traces.append(trace)
                episode.ok = episode.ok and trace.ok
            elif act == "error":
                episode.ok = False
                episode.errors.append(Object(type=value[0], message=value[1]))
            elif act == "late":
                episode.ok, episode.is_timeout = False, True
            elif act == "raise":
                raise ValueError(value)
            elif act == "wait":
                await asyncio.sleep(value)
            elif act == "hang":
                time.sleep(value)
            elif act == "exit":
                os._exit(value)
            elif act == "retry":
                on_discard(None)
        return episode


def ask(client, text):
    """Ask as the real clients do, and return what the model said."""
    url = urlsplit(client.base_url)
    path, body = f"{url.path}/chat/completions", {"messages": [{"role": "user", "content": text}]}
    if isinstance(client, TrainClientConfig):
        ids = list(text.encode())
        path = f"{url.path.removesuffix('/v1')}/inference/v1/generate"
        body = {"token_ids": ids, "sampling_params": {"logprobs": 1, "skip_special_tokens": False}}
    connection = http.client.HTTPConnection(url.hostname, url.port)
    key = os.environ[client.api_key_var]
    headers = {"Authorization": f"Bearer {key}", "X-Session-ID": "trace"}
    headers["Content-Type"] = "application/json"
    connection.request("POST", path, json.dumps({"model": "policy", **body}), headers)
    answer = connection.getresponse()
    choice = json.load(answer)["choices"][0]
    if "message" in choice:
        return choice["message"]["content"]
    tokens = [entry["token"] for entry in choice["logprobs"]["content"]]
    assert tokens == [f"token_id:{token}" for token in choice["token_ids"]]
    return str(choice["token_ids"])
