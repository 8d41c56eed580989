"""The process of a `verifiers` environment. Its interpreter has verifiers, and nothing of verlite.

    PYTHON -P verifiers_process.py SETTINGS

SETTINGS is JSON: `environment`, `config`, `renderer`, `tokenizer`, and `rows`: null, or how many
tasks to print, a line each, with -1 for all. Without it, the environment is served: a JSON object a
line, on the input

    {"run": 7, "task": {...}, "base_url": "http://...", "key": "..."}
    {"cancel": 7}

and on the output

    {"ready": "0.4.0"}
    {"done": 7, "score": 1.0, "parts": {"right": 1.0, ...}}
    {"done": 7, "error": "TaskError: ..."}

until the input ends. Whatever the environment prints goes to the standard error stream.
"""

import asyncio
import functools
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

VERSION = "0.4."
MAX_LINE = 64 << 20
Json = dict[str, Any]


def load(settings: Json) -> Any:
    """Return the environment. Exits with one line that says why there is none."""
    try:
        import verifiers
        from verifiers.v1 import TrainClientConfig
        from verifiers.v1.utils.loaders import load_environment, resolve_env_config
    except ImportError as error:
        sys.exit(
            f"verifiers cannot be imported by {sys.executable}: {error}. "
            f"Install it there: uv pip install --python {sys.executable} 'verifiers==0.4.*'"
        )
    if not verifiers.__version__.startswith(VERSION):
        sys.exit(f"verifiers {verifiers.__version__} is installed; verlite needs {VERSION}*")
    name, _, taskset = settings["environment"].rpartition("+")
    config = settings["config"]
    config = {**config, "taskset": {**config.get("taskset", {}), "id": taskset}}
    try:
        if settings["renderer"] is not None:
            TrainClientConfig(renderer=settings["renderer"])
        return load_environment(resolve_env_config({"id": name, **config}))
    except Exception as error:  # an environment may raise anything
        sys.exit(f"the environment {settings['environment']} cannot be loaded: {explain(error)}")


def explain(error: BaseException) -> str:
    """Return an exception in one line."""
    if hasattr(error, "errors") and hasattr(error, "title"):  # pydantic's, of several lines
        parts = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
        return "; ".join(parts)
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def rows(env: Any, count: int) -> Iterator[Json]:
    """Yield tasks as `task` and the `prompt` that the model may see first."""
    from verifiers.v1.types import content_text

    tasks = env.taskset if count < 0 else env.taskset.take(count)
    if not tasks.bounded:
        sys.exit(f"{type(env.taskset).__name__} has no end: say how many tasks (--count)")
    for task in tasks:
        data = task.data
        prompt = [] if data.system_prompt is None else [("system", data.system_prompt)]
        if isinstance(data.prompt, str):
            prompt.append(("user", data.prompt))
        else:
            prompt += [(m.role, content_text(m.content)) for m in data.prompt or []]
        prompt = prompt or [("user", data.description or data.name or "")]
        messages = [{"role": role, "content": text} for role, text in prompt]
        yield {"task": data.model_dump(mode="json", exclude_defaults=True), "prompt": messages}


class Server:
    """Runs episodes."""

    def __init__(self, env: Any, settings: Json, events: int) -> None:
        self._env = env
        self._settings = settings
        self._events = events
        self._running: dict[int, asyncio.Task[Json]] = {}

    def report(self, **event: Any) -> None:
        line = json.dumps(event).encode() + b"\n"
        while line:
            line = line[os.write(self._events, line) :]

    async def serve(self) -> None:
        """Answer until the input ends."""
        from verifiers import __version__

        reader = asyncio.StreamReader(limit=MAX_LINE)
        await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
        )
        async with self._env.serving():
            self.report(ready=__version__)
            while line := await reader.readline():
                request = json.loads(line)
                if "cancel" in request:
                    if task := self._running.get(request["cancel"]):
                        task.cancel()
                    continue
                number = request["run"]
                task = asyncio.create_task(self._episode(request))
                self._running[number] = task
                task.add_done_callback(functools.partial(self._ended, number))
            for task in list(self._running.values()):
                task.cancel()
            await asyncio.gather(*self._running.values(), return_exceptions=True)

    def _ended(self, number: int, task: asyncio.Task[Json]) -> None:
        del self._running[number]
        if task.cancelled():  # perhaps before it began
            result = {"error": "Cancelled"}
        elif (error := task.exception()) is not None:  # of a task that does not fit, for example
            result = {"error": explain(error)}
        else:
            result = task.result()
        self.report(done=number, **result)

    async def _episode(self, request: Json) -> Json:
        from verifiers.v1 import ModelContext

        kind = type(self._env.taskset).task_type()
        data = kind.data_type().model_validate(request["task"])
        task = kind(data, self._env.config.taskset.task)
        client = self._client(request["base_url"], request["key"])
        abandoned: list[Any] = []
        episode = await self._env.run_episode(
            task, ModelContext("policy", client), on_discard=abandoned.append
        )
        return result_of(episode, request["base_url"], bool(abandoned))

    def _client(self, base_url: str, key: str) -> Any:
        """Return verifiers' description of the session. Its key is in a variable, whose name keeps
        it from the programs that verifiers starts here."""
        from verifiers.v1 import EvalClientConfig, TrainClientConfig

        place = base_url.split("/")[-2]
        name = f"VERLITE_API_KEY_{place}"
        os.environ[name] = key
        address = {"base_url": base_url, "api_key_var": name}
        renderer = self._settings["renderer"]
        if renderer is None:
            return EvalClientConfig(**address)
        tokenizer = self._settings["tokenizer"]
        return TrainClientConfig(**address, renderer=renderer, renderer_model_name=tokenizer)


def result_of(episode: Any, base_url: str, retried: bool) -> Json:
    """Return the score of an episode, or why it has none."""
    failed = [trace for trace in episode.traces if not trace.ok]
    if not episode.ok:
        errors = [error for trace in failed for error in trace.errors] + list(episode.errors)
        if errors:
            return {"error": f"{errors[-1].type}: {errors[-1].message}"}
        late = episode.is_timeout or any(trace.is_timeout for trace in failed)
        causes = ", ".join(str(trace.stop_condition) for trace in failed) or "no agent ran"
        return {"error": f"{'TimeoutError' if late else 'EpisodeError'}: it is not ok: {causes}"}
    if retried:
        return {"error": "Retried: an attempt of an agent was given up; use max_retries=0"}
    ours = [t for t in episode.traces if t.agent.config.client.base_url == base_url and t.calls]
    judges = sorted({trace.agent.name for trace in ours if not trace.agent.trainable})
    if judges:
        return {"error": f"Untrainable: {', '.join(judges)} must not ask the model that is trained"}
    scores = {trace.reward for trace in ours}
    if len(scores) > 1:
        return {"error": f"SeveralScores: agents of one episode got {sorted(scores)}"}
    parts: Json = {}
    for trace in ours:
        parts |= trace.metrics
        parts |= {name: reward.value for name, reward in trace.rewards.items() if reward}
    parts = {name: value for name, value in parts.items() if value is not None}
    return {"score": scores.pop() if scores else None, "parts": parts}


def main() -> None:
    settings = json.loads(sys.argv[1])
    sys.path.append(os.getcwd())  # tasksets of the user, as `verifiers` finds them
    events = os.dup(1)
    os.dup2(2, 1)
    env = load(settings)
    if settings["rows"] is None:
        asyncio.run(Server(env, settings, events).serve())
        return
    with os.fdopen(events, "w") as out:
        for row in rows(env, settings["rows"]):
            out.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
