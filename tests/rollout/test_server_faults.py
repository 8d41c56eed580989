"""What the engine `server` does when servers die, hang, restart or answer wrongly."""

import asyncio
import dataclasses
import threading
import time

import pytest
import torch

from tests.controller.conftest import within
from tests.models import tiny_model
from tests.rollout.fake_servers import FakeServer, expected_ids
from verlite.rollout.batched import build_engine
from verlite.rollout.engines.server import ServerCore
from verlite.rollout.servers import fit, pool
from verlite.rollout.types import EngineError, EngineOptions, Sampling, WeightSyncError
from verlite.spec.roles import GenerationSpec, ModelSpec
from verlite.weights.files import FolderWriter, read_folder
from verlite.weights.fingerprint import fingerprint

pytestmark = pytest.mark.slow

PROMPT = [3, 4, 5]


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> str:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def servers(monkeypatch):
    monkeypatch.setattr(pool, "BEAT_S", 0.05)
    servers = [FakeServer(), FakeServer()]
    yield servers
    for server in servers:
        server.hangs = False
        server.stop()


@pytest.fixture
def new(path, servers):
    """Build engines, and close them after the test."""
    engines = []

    def build(*urls, wait_s=2.0, timeout_s=5.0, request_s=60.0):
        rollout = GenerationSpec(
            servers=list(urls or [server.url for server in servers]),
            server_wait_s=wait_s,
            server_timeout_s=timeout_s,
            request_timeout_s=request_s,
        )
        device = torch.device("cpu")
        engines.append(build_engine("server", ModelSpec(path=path), rollout, 160, device, seed=1))
        return engines[-1]

    yield build
    for engine in engines:
        engine.close()


@pytest.fixture
def synced(new, tmp_path):
    engine = new()
    load(engine, tmp_path)
    return engine


def load(engine, folder, version=1):
    files, value = written(folder, version)
    engine.load_weights(files, version, value)


def written(folder, version=1):
    """Return files of weights, and their fingerprint."""
    weights = [("w", torch.full((4, 4), float(version)))]
    value = fingerprint(weights)
    writer = FolderWriter(folder, version, value)
    writer.add(weights)
    writer.finish()
    return read_folder(folder, version, value), value


def sample(engine, count=40, tokens=4):
    """Return the answers to requests whose tokens are known, checked."""

    async def all_at_once():
        samplings = [Sampling(max_tokens=tokens, seed=seed) for seed in range(count)]
        return await asyncio.gather(*(engine.generate(PROMPT, s) for s in samplings))

    answers = asyncio.run(all_at_once())
    for seed, answer in enumerate(answers):
        assert answer.ids == expected_ids(PROMPT, seed, tokens)
        assert answer.weight_versions == [(engine.version, len(answer.ids))]
    return answers


def while_sampling(engine, action, after_s=0.05, **options):
    """Run `action` in the middle of `sample`."""
    timer = threading.Timer(after_s, action)
    timer.start()
    try:
        return sample(engine, **options)
    finally:
        timer.join()


def cancel_all(engine, servers):
    """Cancel requests that the servers have begun."""
    for server in servers:
        server.delay_s = 0.3

    async def cancel():
        tasks = [
            asyncio.create_task(engine.generate(PROMPT, Sampling(max_tokens=4, seed=i)))
            for i in range(20)
        ]
        await asyncio.sleep(0.1)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(cancel())


def test_servers_share_the_requests(synced, servers):
    sample(synced)
    assert sum(server.asked for server in servers) == 40
    assert min(server.asked for server in servers) >= 10
    for server in servers:
        assert server.calls == [
            "/pause",
            "/start_weight_update",
            "/update_weights",
            "/reset_prefix_cache",
            "/resume",
        ]


def test_a_faster_server_gets_more(synced, servers):
    servers[0].delay_s = 0.2
    sample(synced)
    assert servers[1].asked > 2 * servers[0].asked


def test_the_others_take_the_samples_of_a_server_that_dies(synced, servers, caplog):
    servers[0].delay_s = 5.0
    while_sampling(synced, servers[0].stop)
    assert servers[1].asked >= 40
    assert f"{servers[0].url} does not serve any more" in caplog.text


def test_the_others_take_the_samples_of_a_server_that_hangs(new, servers, tmp_path, caplog):
    engine = new(timeout_s=1.0)
    load(engine, tmp_path)
    while_sampling(engine, lambda: setattr(servers[0], "hangs", True))
    assert "no answer to GET /weight_info within 1 s" in caplog.text


def test_a_server_that_finishes_nothing_is_left(new, servers, tmp_path, caplog):
    engine = new(request_s=1.0)
    load(engine, tmp_path)
    servers[0].paused = True  # by somebody else: it answers, but does not generate
    sample(engine)
    assert "no answer to POST /inference/v1/generate within 1 s" in caplog.text or (
        "it finished none of" in caplog.text
    )


def test_a_restarted_server_gets_the_weights_before_it_serves(synced, servers, caplog):
    old = servers[0].fingerprint

    def restart():
        servers[0].stop()
        servers[0].asked = 0
        servers[0].start()

    servers[1].delay_s = 0.2
    while_sampling(synced, restart)
    assert servers[0].fingerprint == old != 0
    assert servers[0].asked > 0, "it did not serve again"
    assert "serves again" in caplog.text


def test_answers_of_other_weights_are_discarded(synced, servers, caplog, monkeypatch):
    """A server was restarted between two questions about its version."""
    monkeypatch.setattr(pool, "BEAT_S", 600.0)
    servers[0].delay_s = 0.5

    def restart_while_it_generates():
        assert within(60, lambda: servers[0].asked)
        servers[0].version = "default"

    while_sampling(synced, restart_while_it_generates, after_s=0)
    assert "it has the weights 'default' and not 'verlite-" in caplog.text


def test_another_trainer_that_updates_a_server_is_noticed(synced, new, servers, tmp_path, caplog):
    """Each trainer takes the server back, so the samples of both are right; the log says why this
    is slow."""
    other = new(servers[0].url)
    load(other, tmp_path / "other", version=9)
    sample(synced)
    assert "something else updates it" in caplog.text


def test_a_restarted_server_that_loads_other_weights_stays_out(synced, servers, caplog):
    servers[0].version, servers[0].wrong_weights = "default", 1
    servers[1].delay_s = 0.1
    sample(synced)
    assert "after loading, and those of the other servers" in caplog.text


def test_without_a_server_the_run_stops(synced, servers):
    servers[0].stop()
    began = time.monotonic()
    with pytest.raises(EngineError) as caught:
        while_sampling(synced, servers[1].stop, tokens=8)
    assert 2 < time.monotonic() - began < 30
    for server in servers:
        assert server.url in str(caught.value)
    assert "actor_rollout_ref.rollout.server_wait_s=2" in str(caught.value)


def test_minus_one_waits_for_a_server(new, servers, tmp_path):
    engine = new(wait_s=-1)
    load(engine, tmp_path)
    for server in servers:
        server.stop()
    while_sampling(engine, servers[1].start, after_s=3.0)
    assert servers[1].version.startswith("verlite-")


def test_a_dead_server_does_not_stop_a_sync(synced, servers, tmp_path):
    servers[0].stop()
    load(synced, tmp_path, version=2)
    sample(synced)
    servers[0].start()
    servers[1].delay_s = 0.2
    sample(synced)
    assert servers[0].asked > 20


def test_an_update_that_a_dead_trainer_began_is_ended(new, servers, tmp_path):
    """In the first attempt, although the server closes the connection after it has refused a second
    update."""
    engine = new(wait_s=0)
    for server in servers:
        server.updating = True
    load(engine, tmp_path)
    sample(engine, count=4)


def test_a_server_whose_update_cannot_be_ended_is_left(synced, servers, tmp_path, caplog):
    servers[0].updating = servers[0].stuck = True
    load(synced, tmp_path, version=2)
    assert servers[0].calls[-1] == "/start_weight_update", "it loaded without an update"
    assert "may be open; POST /finish_weight_update: HTTP 500" in caplog.text
    sample(synced, count=4)
    assert servers[1].version.endswith("-2") and servers[0].version.endswith("-1")


def test_a_start_without_servers_names_them(new, servers):
    for server in servers:
        server.stop()
    with pytest.raises(RuntimeError, match=f"{servers[0].url}: Connect.*{servers[1].url}"):
        new(wait_s=0.5)


def test_servers_with_different_weights_stop_the_sync(new, servers, tmp_path):
    engine = new()
    servers[1].wrong_weights = 1
    with pytest.raises(WeightSyncError, match="the servers have different weights"):
        load(engine, tmp_path)


def test_a_request_that_always_fails_is_told(synced, servers):
    for server in servers:
        server.status = 500
    with pytest.raises(EngineError, match="a request failed 4 times.*broken"):
        sample(synced, count=1)


def test_a_request_that_always_breaks_the_connection_is_told(synced, servers, monkeypatch):
    monkeypatch.setattr(pool, "MOST_BROKEN", 6)
    for server in servers:
        server.hangs_up = True
    with pytest.raises(EngineError, match="a request failed 6 times.*Remote"):
        sample(synced, count=1)


def test_a_request_that_is_rejected_is_told(synced, servers):
    for server in servers:
        server.status = 400
    with pytest.raises(EngineError, match="rejected a request: HTTP 400"):
        sample(synced, count=1)


def test_an_aborted_request_is_sent_again(synced, servers):
    for server in servers:
        server.finish_reason = "abort"
    threading.Timer(0.1, lambda: [setattr(s, "finish_reason", "length") for s in servers]).start()
    servers[0].delay_s = servers[1].delay_s = 0.06
    sample(synced, count=1)


def test_completions_serve_where_the_token_endpoint_is_missing(synced, servers):
    for server in servers:
        server.has_token_endpoint = False
    sample(synced)


def test_completions_score_where_the_token_endpoint_is_missing(path, servers, tmp_path):
    """The probe of the first weights comes before the first sample."""
    for server in servers:
        server.has_token_endpoint = False
    rollout = GenerationSpec(servers=tuple(server.url for server in servers))
    model, device = ModelSpec(path=path), torch.device("cpu")
    core = ServerCore(EngineOptions(model, rollout, torch.float32, device, 160, 1, False))
    try:
        core.load(written(tmp_path)[0])
        assert core.log_probs([3, 4, 5]) == [-1.0, -1.0]
    finally:
        core.close()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("max_model_len", 100, "--max-model-len is 100"),
        ("vocab_size", 9, "its model has 9 tokens"),
        ("dtype", "bfloat16", "--dtype is bfloat16"),
        ("logprobs_mode", "raw_logprobs", "--logprobs-mode is raw_logprobs"),
        ("weight_transfer", "nccl", "--weight-transfer-config is nccl"),
    ],
)
def test_a_server_that_does_not_fit_is_refused(new, servers, name, value, message):
    servers[1].settings[name] = value
    with pytest.raises(ValueError, match=f"{servers[1].url} cannot be used: .*{message}"):
        new()


def test_the_driver_asks_the_servers_before_anything_starts(servers, monkeypatch):
    monkeypatch.setattr(fit, "AGAIN_S", 0.05)
    rollout = GenerationSpec(servers=tuple(server.url for server in servers), server_wait_s=60.0)
    needs = fit.Needs(160, 128, "float32")
    assert fit.check(rollout, needs, pytest.fail) is None
    servers[1].stop()
    warning = fit.check(rollout, needs, pytest.fail)
    assert servers[1].url in warning and servers[0].url not in warning
    servers[0].stop()
    waits = []

    def say(text):
        waits.append(text)
        servers[0].start()

    assert servers[1].url in fit.check(rollout, needs, say)
    assert len(waits) == 1 and "server_wait_s=60" in waits[0]
    servers[0].stop()
    rollout = dataclasses.replace(rollout, server_wait_s=0.2)
    with pytest.raises(fit.NoServer, match=f"{servers[0].url}.*{servers[1].url}"):
        fit.check(rollout, needs, waits.append)
    assert len(waits) == 2


def test_a_server_with_another_version_of_verlite_is_refused(new, servers):
    servers[0].settings["new_in_another_version"] = 1
    with pytest.raises(ValueError, match=f"{servers[0].url} cannot be used: .*verlite_settings"):
        new()


def test_a_server_that_dies_while_a_sync_asks_for_its_settings_is_left(synced, servers, tmp_path):
    servers[0].settings_break = True
    load(synced, tmp_path, version=2)
    sample(synced, count=4)
    assert servers[1].version.endswith("-2") and servers[0].version.endswith("-1")


def test_a_sync_after_cancelled_requests_has_each_server_to_itself(
    synced, servers, tmp_path, monkeypatch
):
    """The watchers still ran: they saw other weights, and loaded the new ones at the same time."""
    monkeypatch.setattr(pool, "BEAT_S", 0.0)
    cancel_all(synced, servers)
    for server in servers:
        server.calls.clear()
        server.load_s = 0.3
    load(synced, tmp_path, version=2)
    assert [server.calls.count("/update_weights") for server in servers] == [1, 1]


def test_cancelled_requests_leave_the_servers(synced, servers):
    cancel_all(synced, servers)
    servers[0].delay_s = servers[1].delay_s = 0.0
    sample(synced, count=4)
