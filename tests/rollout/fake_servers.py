"""A server with the endpoints of vLLM that training uses, in a thread, and with faults."""

import asyncio
import threading
import time
from typing import Any

import uvicorn
from fastapi import Body, FastAPI, Request
from fastapi.responses import JSONResponse, Response

from tests.rollout.vllm_servers import free_port
from verlite.weights.buckets import BucketFiles
from verlite.weights.fingerprint import fingerprint

VOCABULARY = 128


def expected_ids(prompt: list[int], seed: int, count: int) -> list[int]:
    """Return the tokens that every fake server samples."""
    return [(sum(prompt) + 7 * seed + 3 * i) % VOCABULARY for i in range(count)]


class HangUp(Response):
    """Closes the connection before the answer is complete."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"content-length", b"100")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})


def closes_late(app: FastAPI) -> Any:
    """Return an application whose connections end some time after an error was answered.

    uvicorn closes a connection after an exception, but first it formats the traceback. A request
    that comes meanwhile on the same connection is lost.
    """

    async def run(scope: Any, receive: Any, send: Any) -> None:
        try:
            await app(scope, receive, send)
        except RuntimeError:
            time.sleep(0.05)
            raise

    return run


class FakeServer:
    """Answers like vLLM. Change the attributes to inject faults.

    Attributes:
        delay_s: of each generation.
        hangs: no request is answered.
        hangs_up: generation closes its connection before the answer is complete.
        settings_break: so does the question for its settings.
        load_s: of a weight update.
        status: of the answers to generation, if not 200.
        finish_reason: of each generation.
        wrong_weights: added to the fingerprint.
        missing: paths that it does not know.
        version: of the weights.
        updating: whether an update has begun and not ended. As in vLLM, none can begin then.
        stuck: an update that has begun cannot be ended.
        asked: number of generation requests that it received.
        calls: paths of the requests for weights, in their order.
    """

    def __init__(self, port: int | None = None) -> None:
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.delay_s = 0.02
        self.hangs = self.hangs_up = self.settings_break = self.stuck = False
        self.load_s = 0.0
        self.status = 200
        self.finish_reason = "length"
        self.wrong_weights = 0
        self.version = "default"
        self.fingerprint = 0
        self.paused = self.updating = False
        self.has_token_endpoint = True
        self.missing: set[str] = set()
        self.settings: dict[str, Any] = {
            "max_model_len": 160,
            "vocab_size": VOCABULARY,
            "dtype": "float32",
            "logprobs_mode": "processed_logprobs",
            "max_num_seqs": 4,
            "weight_transfer": "verlite",
        }
        self.asked = 0
        self.calls: list[str] = []
        self._server: uvicorn.Server | None = None
        self.start()

    def start(self) -> None:
        """Start, as new: with other weights than those of a trainer."""
        self.version, self.fingerprint = "default", 0
        self.paused = self.updating = self.hangs = False
        config = uvicorn.Config(
            closes_late(self._app()),
            port=self.port,
            log_level="critical",
            timeout_graceful_shutdown=0,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        while not self._server.started:
            time.sleep(0.01)

    def stop(self) -> None:
        """Die: connections break, and no one listens any more."""
        if self._server is not None:
            self._server.force_exit = self._server.should_exit = True
            self._thread.join()
            self._server = None

    def _app(self) -> FastAPI:
        app = FastAPI()

        @app.middleware("http")
        async def maybe_hang(request: Request, call):
            while self.hangs:
                await asyncio.sleep(0.05)
            if request.url.path in self.missing:
                return JSONResponse({"detail": "Not Found"}, 404)
            return await call(request)

        @app.get("/weight_info")
        async def weight_info():
            return {"weight_version": self.version}

        @app.get("/v1/models")
        async def models():
            return {"data": [{"id": "fake"}]}

        @app.post("/collective_rpc")
        async def collective_rpc(body: dict):
            if body["method"] == "verlite_settings":
                if self.settings_break:
                    return HangUp()
                return {"results": [self.settings]}
            return {"results": [{"all": self.fingerprint + self.wrong_weights}]}

        @app.post("/update_weights")
        async def update_weights(body: dict):
            self.calls.append("/update_weights")
            await asyncio.sleep(self.load_s)
            paths = tuple(body["update_info"]["sizes"])
            self.fingerprint = fingerprint(BucketFiles(paths))
            return {}

        @app.post("/start_weight_update")
        async def start():
            self.calls.append("/start_weight_update")
            if self.updating:
                raise RuntimeError("a weight update is already active")
            self.updating = True
            return {}

        @app.post("/finish_weight_update")
        async def finish(weight_version: str = Body("default", embed=True)):
            if self.stuck or not self.updating:
                raise RuntimeError("no weight update has started")
            self.updating = False
            self.version = weight_version
            return {}

        @app.post("/reset_prefix_cache")
        async def reset():
            self.calls.append("/reset_prefix_cache")
            return {"success": True}

        @app.post("/{path}")
        async def other(path: str):
            self.calls.append(f"/{path}")
            self.paused = path == "pause" or (self.paused and path != "resume")
            return {}

        @app.post("/inference/v1/generate")
        async def generate(body: dict):
            if not self.has_token_endpoint:
                return JSONResponse({"error": "disabled"}, 403)
            if self.hangs_up:
                return HangUp()
            ids, reason = await self._generate(body["token_ids"], body["sampling_params"])
            if self.status != 200:
                return JSONResponse({"error": {"message": "broken"}}, self.status)
            return {
                "choices": [
                    {
                        "finish_reason": reason,
                        "token_ids": ids,
                        "logprobs": {"content": [{"token_id": i, "logprob": -1.0} for i in ids]},
                        "weight_versions": [{"version": self.version, "start": 0, "end": 4}],
                    }
                ]
            }

        @app.post("/v1/completions")
        async def completions(body: dict):
            if "prompt_logprobs" in body:
                scored = [{str(token): {"logprob": -1.0}} for token in body["prompt"]]
                return {"choices": [{"prompt_logprobs": [None, *scored[1:]]}]}
            ids, reason = await self._generate(body["prompt"], body)
            choice = {"finish_reason": reason, "token_ids": ids}
            return {"choices": [choice | {"logprobs": {"token_logprobs": [-1.0] * len(ids)}}]}

        app.router.routes.sort(key=lambda route: "{path}" in getattr(route, "path", ""))
        return app

    async def _generate(self, prompt: list[int], params: dict) -> tuple[list[int], str]:
        self.asked += 1
        await asyncio.sleep(self.delay_s)
        while self.hangs or self.paused:
            await asyncio.sleep(0.05)
        return expected_ids(prompt, params["seed"], params["max_tokens"]), self.finish_reason
