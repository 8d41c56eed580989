"""Mutants of verlite.rollout: samples that are not what the trainer thinks they are."""

import dataclasses

from tests.mutants import Mutant
from tests.mutants.patches import argument, calls, constant, does_nothing, result, returns

TYPES = "verlite.rollout.types:"
TRAJECTORY = "verlite.rollout.trajectory:"
BATCHED = "verlite.rollout.batched:"
SAMPLING = "verlite.rollout.sampling:"
HF = "verlite.rollout.engines.hf:HFCore."
VLLM = "verlite.rollout.engines.vllm:VLLMCore."
VLLM_WORKER = "verlite.rollout.engines.vllm_worker:"
LOOP = "tests/rollout/test_trajectory.py"
HF_ENGINE = "tests/rollout/test_hf.py"
VLLM_ENGINE = "tests/rollout/test_vllm.py"
VLLM_ADAPTERS = "tests/rollout/test_vllm_adapters.py"
WRAPPER = "tests/rollout/test_batched.py"
SWAPS = "tests/rollout/test_swaps.py"
POOL = "verlite.rollout.servers.pool:"
SERVER = "verlite.rollout.servers.vllm_server:"
FAULTS = "tests/rollout/test_server_faults.py"


_seen = {}


async def _installs_nothing(original, self, delivery, version):
    """Only the first time for a server."""
    if self not in _seen:
        _seen[self] = True
        await original(self, delivery, version)
    else:
        await self._call("POST", "/finish_weight_update", {"weight_version": version})


async def _always_well(original, self, *args):
    return None


def _observations_trained(original, self, ids):
    original(self, ids)
    n = len(ids)
    if n:
        self.response_mask[-n:] = [1] * n


def _through_text(original, engine, trajectory, sampling):
    from verlite.rollout.trajectory import Trajectory

    async def generate():
        completion = await original(engine, trajectory, sampling)
        start = len(trajectory.response_ids) - len(completion.ids)
        text = engine.tokenizer.decode(completion.ids)
        ids = engine.tokenizer.encode(text, add_special_tokens=False)
        trajectory.response_ids[start:] = (ids + completion.ids)[: len(completion.ids)]
        assert isinstance(trajectory, Trajectory)
        return completion

    return generate()


def _any_fingerprint(original, self, core, named, version, expected):
    core.load(named)
    core.reset_caches()
    self.version = version
    self._not_ready_reason = None


def _ignores_running_requests(original, self, core, *args):
    class Idle:
        def __getattr__(self, name):
            return (lambda: 0) if name == "pending" else getattr(core, name)

    return original(self, Idle(), *args)


def _accepts_a_failed_sync(original, self, core, named, version, expected):
    try:
        original(self, core, named, version, expected)
    finally:
        self._not_ready_reason = None


def _loads_nothing(original, self, named):
    for _ in named:
        pass


def _stale_layer(original, self, named):
    return original(self, (pair for pair in named if "layers.1." not in pair[0]))


def _without_seed(original, sampling, turn):
    return sampling


def _unit_temperature(original, self, request_id, prompt_ids, sampling):
    temperature = min(sampling.temperature, 1.0) if sampling.greedy else 1.0
    return original(
        self, request_id, prompt_ids, dataclasses.replace(sampling, temperature=temperature)
    )


def _one_number(original, self):
    from verlite.rollout.engines.vllm_worker import adapter_request

    return adapter_request(1)


MUTANTS = [
    # trajectories
    Mutant(
        "observations are trained",
        TYPES + "Trajectory.append_observation",
        calls(_observations_trained),
        (LOOP,),
    ),
    Mutant(
        "sampled ids are decoded and encoded again",
        TRAJECTORY + "_generate",
        calls(_through_text),
        (LOOP,),
    ),
    Mutant(
        "every turn draws the same random numbers",
        TRAJECTORY + "with_seed",
        calls(_without_seed),
        (LOOP,),
    ),
    Mutant(
        "the environment sees text after its stop string",
        TRAJECTORY + "_text_view",
        argument("stop", lambda stop: ()),
        (LOOP,),
    ),
    # weight versions
    Mutant(
        "a sync is accepted without comparing fingerprints",
        BATCHED + "BatchedEngine._load",
        calls(_any_fingerprint),
        (HF_ENGINE,),
    ),
    Mutant(
        "weights change under running requests",
        BATCHED + "BatchedEngine._load",
        calls(_ignores_running_requests),
        (WRAPPER,),
    ),
    Mutant(
        "an engine generates after a failed sync",
        BATCHED + "BatchedEngine._load",
        calls(_accepts_a_failed_sync),
        (HF_ENGINE,),
    ),
    Mutant(
        "a dead engine leaves its requests waiting",
        BATCHED + "_answer",
        does_nothing,
        (f"{WRAPPER}",),
    ),
    # the hf engine
    Mutant("a sync to hf has no effect", HF + "load", calls(_loads_nothing), (HF_ENGINE,)),
    Mutant(
        "hf ignores the temperature",
        HF + "add",
        calls(_unit_temperature),
        (HF_ENGINE, "tests/engine/test_sampled.py"),
    ),
    Mutant(
        "the random numbers of hf depend on the row's place",
        HF + "_random_key",
        calls(lambda original, self, sampling: len(self._rows)),
        (HF_ENGINE,),
    ),
    Mutant(
        "hf trusts a wrong cache",
        "verlite.rollout.engines.hf:_CACHE_TOLERANCE",
        constant(1e9),
        (HF_ENGINE,),
    ),
    Mutant(
        "hf keeps its weights in sleep",
        "verlite.rollout.engines.hf:_frees_weights",
        calls(lambda original, options: False),
        (HF_ENGINE,),
    ),
    # weights loaded while requests run
    Mutant(
        "the last token before a load belongs to the new weights",
        HF + "progress",
        result(lambda counts: {request: count - 1 for request, count in counts.items()}),
        (SWAPS,),
    ),
    Mutant(
        "running requests keep old keys and values", HF + "reset_caches", does_nothing, (SWAPS,)
    ),
    # sampling
    Mutant(
        "neighboring seeds give related numbers",
        SAMPLING + "mix64",
        calls(lambda original, seed: seed),
        ("tests/rollout/test_sampling.py",),
    ),
    Mutant(
        "top_k and top_p are ignored",
        SAMPLING + "_filter",
        calls(lambda original, scaled, top_k, top_p: scaled),
        ("tests/rollout/test_sampling.py",),
    ),
    # vLLM
    Mutant("one layer of vLLM stays old", VLLM + "load", calls(_stale_layer), (VLLM_ENGINE,)),
    Mutant("the prefix cache survives a sync", VLLM + "reset_caches", does_nothing, (VLLM_ENGINE,)),
    Mutant(
        "every version of the adapters has one name",
        VLLM + "_next_adapter",
        calls(_one_number),
        (VLLM_ADAPTERS,),
    ),
    Mutant(
        "the fingerprint leaves the adapters out",
        VLLM_WORKER + "_adapter_parts",
        returns({}),
        (VLLM_ADAPTERS,),
    ),
    Mutant(
        "packed weights are trusted, not read",
        VLLM_WORKER + "_PROBED_COLUMNS",
        constant(0),
        (VLLM_ENGINE,),
    ),
    # Servers
    Mutant(
        "a sample of other weights is taken",
        SERVER + "_token_reply",
        result(lambda reply: dataclasses.replace(reply, versions=frozenset())),
        (FAULTS + "::test_answers_of_other_weights_are_discarded",),
    ),
    Mutant(
        "the requests of a server that died are lost",
        POOL + "ServerPool._stop_requests",
        result(lambda asks: []),
        (FAULTS + "::test_the_others_take_the_samples_of_a_server_that_dies",),
    ),
    Mutant(
        "a restarted server serves with the weights that it has",
        SERVER + "VLLMServer.install",
        calls(_installs_nothing),
        (FAULTS + "::test_a_restarted_server_gets_the_weights_before_it_serves",),
    ),
    Mutant(
        "nobody asks whether servers are well",
        POOL + "ServerPool._beat",
        calls(_always_well),
        (FAULTS + "::test_the_others_take_the_samples_of_a_server_that_hangs",),
    ),
    Mutant(
        "a turn may be rewarded with NaN",
        "verlite.rollout.trajectory:_finite",
        calls(lambda original, reward: float(reward)),
        ("tests/rollout/test_trajectory.py::test_rewards_of_turns",),
    ),
]
