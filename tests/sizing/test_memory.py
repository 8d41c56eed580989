"""All roles of a run together: phases of a device, offload, advice, the cache."""

from dataclasses import replace

import pytest

from verlite.config.compile import model_spec
from verlite.config.plan import Micro
from verlite.sizing import memory as sizing
from verlite.sizing.advice import SizedRun, advise, largest_micro_batch, make_fit
from verlite.sizing.devices import Devices
from verlite.sizing.facts import model_facts
from verlite.sizing.measure import Measurer, PassRows, RoleMemory, folder, key_of
from verlite.sizing.memory import FRAGMENTS, PROCESS, run_memory, sync_bytes, training_roles
from verlite.spec.roles import ModelSpec

GIB = 2**30
WEIGHTS = 4 * GIB
MOMENTS = 8 * GIB


def measured(spec, passes) -> RoleMemory:
    """Stands for the engines: an update needs 2 GiB per sample, 5 times as much without
    checkpointing; a forward pass 1 GiB."""
    trained = spec.optim is not None
    held = WEIGHTS + MOMENTS * trained
    factor = {True: 1, "attention": 2, "products": 3, False: 5}[
        spec.model.enable_gradient_checkpointing
    ]
    samples = len(passes.update.lengths) if passes.update else 0
    return RoleMemory(
        WEIGHTS,
        MOMENTS * trained,
        held,
        held + GIB,
        (held + 2 * GIB * factor * samples) * trained,
        GIB if spec.model.enable_activation_offload else 0,
    )


BY_MEMORY = "actor_rollout_ref.rollout.weight_transport=shared_memory"


@pytest.fixture
def run(planned):
    """Return a function that plans a run on devices of a size, without running engines."""

    def make(gib: int, *overrides: str) -> SizedRun:
        config, plan = planned("tiny", *overrides)
        facts = model_facts(model_spec(config.actor_rollout_ref.model))
        devices = Devices("test", plan.devices_per_node, gib * GIB, "cuda")
        found = run_memory(config, plan, devices, facts, measured)
        return SizedRun(config, plan, devices, facts, measured, found)

    return make


def test_the_largest_micro_batch_counts_prompts_once(planned):
    """Groups of 4 with a prompt of 40 and responses of 10 have 80 tokens: 200 have two groups, and
    40 of another sample. Paths have at most 4 times the limit."""
    sizes = ("data.max_prompt_length=40", "data.max_response_length=10")
    config, plan = planned("tiny", *sizes, "actor_rollout_ref.rollout.n=4")
    shared = model_spec(config.actor_rollout_ref.model)
    alone = replace(shared, share_prefixes=False)

    def of(tokens: int, rows: int, model: ModelSpec) -> PassRows:
        return sizing.largest(plan, Micro(None, tokens), rows, model)

    assert of(200, 99, shared) == PassRows((50,) * 8 + (40,), 10, True, (0,) * 4 + (1,) * 4 + (-1,))
    assert of(200, 99, alone) == PassRows((50,) * 4, 10, True)
    assert of(220, 99, alone) == PassRows((50,) * 4 + (20,), 10, True)
    assert of(200, 4, alone) == PassRows((50,) * 4, 10)
    assert of(200, 6, shared) == PassRows((50,) * 6, 10, False, (0,) * 4 + (1,) * 2)
    wide = replace(plan, samples_per_prompt=64)
    found = sizing.largest(wide, Micro(None, 200), 99, shared)
    assert found.lengths == (50,) * 16  # 40 + 16 * 10 tokens
    found = sizing.largest(replace(wide, longest_response=1), Micro(None, 200), 99, shared)
    assert sum(found.lengths) == 4 * 200


def held(run: SizedRun) -> dict[str, dict[str, float]]:
    """Return the GiB of each role in each phase of the first devices."""
    return {
        phase.name: {role: round(size / GIB, 2) for role, size in phase.held.items()}
        for phase in run.memory.groups[0].phases
    }


def test_roles_of_a_device_add_up_in_each_phase(run):
    found = held(run(80, "actor_rollout_ref.actor.use_kl_loss=true", BY_MEMORY))
    assert list(found) == [
        "build",
        "generation",
        "old log-probs",
        "reference log-probs",
        "values",
        "critic update",
        "actor update",
        "sync: gather",
        "sync: load",
        "checkpoint",
    ]
    rest = {"actor": 12, "ref": 4, "critic": 12}
    assert found["build"] == rest | {"rollout": 0}
    assert found["generation"] == rest | {"rollout": 40}
    assert found["old log-probs"] == rest | {"actor": 13, "rollout": 0}
    assert found["reference log-probs"] == rest | {"ref": 5, "rollout": 0}
    assert found["critic update"] == rest | {"critic": 20, "rollout": 0}
    assert found["actor update"] == rest | {"actor": 20, "rollout": 0}
    assert found["checkpoint"] == rest | {"rollout": 40}  # the sync has woken the engines


def test_offload_frees_what_it_names_outside_its_pass(run):
    actor, critic = "actor_rollout_ref.actor.fsdp_config.", "critic.model.fsdp_config."
    one = run(80, f"{actor}optimizer_offload=true", f"{critic}param_offload=true")
    found = held(one)
    assert found["generation"] == {"actor": 4, "rollout": 40, "critic": 8}
    assert found["old log-probs"]["actor"] == 5  # no moments
    assert found["actor update"] == {"actor": 20, "rollout": 0, "critic": 8}
    assert found["critic update"] == {"actor": 4, "rollout": 0, "critic": 20}
    # The critic's model is built after the actor has offloaded its moments.
    assert found["build"] == {"actor": 4, "rollout": 0, "critic": 12}
    # In the host: 8 ranks with the moments of the actor and the parameters of the critic.
    assert one.memory.host[0].held["offloaded"] == 8 * (MOMENTS + WEIGHTS)


def test_an_engine_that_does_not_sleep_stays(run):
    found = held(run(80, "actor_rollout_ref.rollout.free_cache_engine=false"))
    assert {name: roles["rollout"] for name, roles in found.items() if name != "sync: load"} == {
        name: 40 for name in found if name != "sync: load"
    }


@pytest.mark.parametrize(("sequences", "cache"), [(16, 0.03), (10**6, 0.25 * (80 - 24))])
def test_the_cache_of_hf_is_bounded_by_what_the_others_leave_free(run, sequences, cache):
    """24 GiB of actor and critic stay; the tiny model takes 1 KiB of cache per token."""
    rollout = "actor_rollout_ref.rollout."
    found = held(
        run(
            80,
            f"{rollout}name=hf",
            f"{rollout}max_num_seqs={sequences}",
            f"{rollout}gpu_memory_utilization=0.25",
            "data.max_prompt_length=1024",
            "data.max_response_length=1024",
        )
    )
    assert found["generation"] == {"actor": 12, "rollout": cache, "critic": 12}


def test_engines_that_sync_adapters_sleep_with_their_weights_in_the_host(run):
    options = ("model.lora_rank=4", "rollout.lora_sync=adapter")
    one = run(80, *(f"actor_rollout_ref.{option}" for option in options))
    generation, *others = one.memory.host
    assert "sleeping engines" not in generation.held
    assert {phase.held["sleeping engines"] for phase in others} == {
        8 * sync_bytes(one.plan, one.policy).per_device
    }


def test_streaming_within_a_gpu_needs_both_models_at_once(run):
    """Weights in bfloat16, two buckets of 512 MiB or all weights, and what hashing needs."""
    one = run(80, "actor_rollout_ref.rollout.weight_transport=ipc")
    assert "sync: load" not in held(one) and "sync: gather" not in held(one)
    weights, largest = 2 * one.policy.exported, one.policy.largest
    large = replace(one.policy, exported=2**30, largest=2**25)
    for policy, rollout in (
        (one.policy, 2 * weights + 10 * largest),
        (large, 2**31 + 2 * 2**29 + 10 * 2**24),
    ):
        memory = run_memory(one.config, one.plan, one.devices, policy, measured)
        phase = next(p for p in memory.groups[0].phases if p.name == "sync: stream")
        assert phase.held["rollout"] == rollout
    gathered = 2**29 + 2 * 2**25 + 2 * 2**25 // 8  # a bucket, the largest weight, its shard
    assert phase.held["actor"] == WEIGHTS + MOMENTS + gathered


def test_auto_streams_where_both_models_fit(run):
    """On smaller devices the trial of ipc finds too little memory. A host has room for the copy."""
    streams, one = run(80), run(20)
    assert held(streams).keys() - held(one).keys() == {"sync: check", "sync: stream"}
    assert held(one).keys() - held(streams).keys() == {"sync: gather", "sync: load"}
    for sized in (streams, one):
        copies = [phase.held.get("weights", 0) for phase in sized.memory.host]
        assert max(copies) == 2 * sized.policy.exported


def test_weights_are_checked_before_an_engine_wakes(run):
    """The pass over a few tokens has 3 GiB beside weights and moments; the engine is asleep."""

    def checking(spec, passes) -> RoleMemory:
        found = measured(spec, passes)
        return replace(found, check=found.check + 3 * GIB)

    for transport, name in (("ipc", "sync: check"), ("shared_memory", "sync: gather")):
        one = run(80, f"actor_rollout_ref.rollout.weight_transport={transport}")
        memory = run_memory(one.config, one.plan, one.devices, one.policy, checking)
        phase = next(p for p in memory.groups[0].phases if p.name == name)
        assert phase.held == {"actor": 15 * GIB, "rollout": 0, "critic": 12 * GIB}
        # It is run before the moments exist, too, and 4 + 3 GiB are less than 4 + 8.
        assert memory.groups[0].phases[0].held["actor"] < 13 * GIB


@pytest.mark.parametrize(("eager", "kept"), [("false", 2.5), ("true", 1.0)])
def test_a_sleeping_engine_keeps_its_context_buffers_and_graphs(run, eager, kept):
    one = run(80, f"actor_rollout_ref.rollout.enforce_eager={eager}", BY_MEMORY)
    phases = {phase.name: phase for phase in one.memory.groups[0].phases}
    for name, process in (("old log-probs", kept), ("sync: load", kept), ("generation", 0.5)):
        phase = phases[name]
        tensors = phase.held["actor"] + phase.held["critic"]
        expected = int(FRAGMENTS * tensors) + 2 * PROCESS + process * GIB
        assert phase.margin == pytest.approx(expected, abs=4)


def test_an_engine_of_hf_sleeps_without_its_cache(run):
    found = held(run(80, "actor_rollout_ref.rollout.name=hf"))
    assert found["old log-probs"]["rollout"] == 0 < found["generation"]["rollout"]


def test_apart_the_roles_have_their_own_devices(run):
    one = run(80, "cluster.component_placement={actor: 0-3, rollout: 4-7}")
    assert [(group.devices, group.roles) for group in one.memory.groups] == [
        ([0, 1, 2, 3], ("actor", "critic")),
        ([4, 5, 6, 7], ("rollout",)),
    ]
    assert [phase.name for phase in one.memory.groups[1].phases] == ["generation", "sync: load"]


@pytest.mark.parametrize(("mode", "kept"), [("sync", 0), ("pipelined", 4 + 4)])
def test_pipelined_keeps_parameters_and_gradients_on_the_device(run, mode, kept):
    """Offload frees the 4 GiB of parameters, as large as the gradients, after the update only."""
    actor = "actor_rollout_ref.actor."
    found = held(
        run(
            80,
            "cluster.component_placement={actor: 0-3, rollout: 4-7}",
            "algorithm.adv_estimator=grpo",
            "actor_rollout_ref.rollout.n=4",
            f"trainer.mode={mode}",
            f"{actor}use_kl_loss=true",
            f"{actor}fsdp_config.param_offload=true",
            f"{actor}fsdp_config.optimizer_offload=true",
        )
    )
    assert found["reference log-probs"] == {"actor": kept, "ref": 5}
    assert found["old log-probs"] == {"actor": 5 + kept // 2, "ref": 4}
    assert found["checkpoint"] == {"actor": 0, "ref": 4}


def test_what_fits_is_told_with_the_largest_micro_batch(run):
    one = run(80)
    # 80 - 12 of the critic - margin for the largest n: (12 + 2 n) * 1.05 + 12.6 + 4.3 <= 80
    key, now, most, unit, rows = largest_micro_batch(one, "actor")
    assert (key, now, unit, rows) == (
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
        4,
        "samples",
        32,
    )
    assert most == 16  # four times the configured size: larger ones are not tried

    def fits(samples: int) -> bool:
        return not one.changed(key, samples).over()

    assert fits(16)
    most = largest_micro_batch(one.changed(key, 8), "actor")[2]
    assert most == 24 and fits(24) and not fits(25)
    text = "\n".join(advise(one))
    assert "fullest phase is generation" in text
    assert (
        "ppo_micro_batch_size_per_gpu may be up to 16 samples (the largest that was tried); it is 4"
        in text
    )
    assert "enable_gradient_checkpointing=true is needed" not in text  # 52 GiB fit too


@pytest.mark.parametrize(("gib", "kept"), [(61, "products"), (52, "attention"), (45, None)])
def test_the_least_recomputation_that_fits_is_advised(run, gib, kept):
    """An update of 4 samples: (12 + 2 * 4 * n) * 1.05 + 12.6 of the critic + 4.3, where n is 1 with
    all recomputed, 2 with attention kept, 3 with products, 5 with everything."""
    share = "actor_rollout_ref.rollout.gpu_memory_utilization=0.3"
    text = "\n".join(advise(run(gib, share, "critic.ppo_micro_batch_size_per_gpu=1")))
    over = round((12 + 40) * 1.05 + 12.6 + 4.3 - gib, 1)
    key = "actor_rollout_ref.model.enable_gradient_checkpointing"
    if kept:
        assert f"{key}={kept} would fit too, and recomputes less; false is over by {over}" in text
    else:
        assert f"{key}=true is needed: without it over by {over}" in text


def test_compiled_layers_are_not_advised_to_keep_a_part(run):
    """61 GiB, where products would fit, as in the test above."""
    options = [
        "critic.ppo_micro_batch_size_per_gpu=1",
        "actor_rollout_ref.rollout.gpu_memory_utilization=0.3",
    ]
    for compiled in ("true", "false"):
        one = run(61, *options, f"actor_rollout_ref.actor.fsdp_config.use_torch_compile={compiled}")
        key = "actor_rollout_ref.model.enable_gradient_checkpointing"
        text = "\n".join(advise(one))
        assert (f"{key}=true is needed" in text) == (compiled == "true")


@pytest.mark.parametrize("kept", ["products", "attention"])
def test_what_the_user_keeps_is_kept_where_later_changes_make_room(run, kept):
    """28 GiB: true helps first, but offload and one sample at a time make room without it."""
    key = "actor_rollout_ref.model.enable_gradient_checkpointing"
    share = "actor_rollout_ref.rollout.gpu_memory_utilization=0.3"
    fitting, changes = make_fit(
        run(28, share, "critic.ppo_micro_batch_size_per_gpu=1", f"{key}={kept}")
    )
    assert not fitting.over() and fitting.config.actor_rollout_ref.model == (
        run(28, f"{key}={kept}").config.actor_rollout_ref.model
    )
    assert changes and not [change for change in changes if change.startswith(key)]


def test_a_token_budget_is_advised_where_the_run_has_one(run):
    one = run(
        80,
        "actor_rollout_ref.actor.use_dynamic_bsz=true",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=8192",
    )
    key, now, most, unit, _ = largest_micro_batch(one, "actor")
    assert key.endswith("ppo_max_token_len_per_gpu") and now == 8192 and unit == "tokens"
    assert most is not None and most // 1024 == 24


def test_what_does_not_fit_is_told_with_what_would(run):
    one = run(26)  # 24 for the parameters and moments of both, without a margin
    text = "\n".join(advise(one))
    assert "Does not fit: devices 0-7 in phase actor update, over by" in text
    fitting, changes = make_fit(one)
    assert not fitting.over()
    assert "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1" in changes
    for change in changes:
        assert change in text
    # What it names is what a run with these keys needs.
    again = run(26, *changes)
    assert not again.over() and again.memory == fitting.memory


def test_the_cache_of_vllm_is_kept_if_offload_helps(run):
    """A little less for vLLM is cheap; most of its KV cache is not."""
    slightly = make_fit(run(72, "actor_rollout_ref.rollout.gpu_memory_utilization=0.7"))[1]
    # 72 - 24 of parameters and moments - 3.5 of margin = 44.5 = 0.618 x 72
    assert slightly == ["actor_rollout_ref.rollout.gpu_memory_utilization=0.61"]
    much = make_fit(run(64, "actor_rollout_ref.rollout.gpu_memory_utilization=0.8"))[1]
    assert much and all("offload=true" in change for change in much[:1])


def test_what_cannot_fit_is_said(run):
    text = "\n".join(advise(run(8)))
    assert "No setting that this command knows makes it fit" in text
    assert "stays over by" in text


def test_needless_offload_is_named(run):
    key = "critic.model.fsdp_config.optimizer_offload"
    text = "\n".join(advise(run(80, f"{key}=true")))
    assert f"{key}=true is not needed" in text


def test_unknown_devices_ask_for_their_name(run):
    one = run(80)
    unknown = replace(one, devices=replace(one.devices, bytes=None))
    assert advise(unknown)[0].startswith("Name the devices, as in --devices 8xH100-80GB")


def test_results_are_kept_until_something_changes(planned, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config, plan = planned("tiny")
    role = training_roles(config, plan)[0]
    first, again = Measurer(measure=measured), Measurer(measure=measured)
    expected = first(role.spec, role.passes)
    assert again(role.spec, role.passes) == expected
    assert (first.measured, first.found, again.measured, again.found) == (1, 0, 0, 1)
    assert str(folder()) in again.sentence() and str(tmp_path) in again.sentence()
    without = Measurer(use_cache=False, measure=measured)
    without(role.spec, role.passes)
    assert without.measured == 1

    key = key_of(role.spec, role.passes)
    other_ranks = replace(role.spec, ranks=4)
    config_json = tmp_path / "tiny" / "config.json"
    assert key_of(other_ranks, role.passes) != key
    config_json.write_text(
        config_json.read_text().replace('"hidden_size": 64', '"hidden_size": 128')
    )
    assert key_of(role.spec, role.passes) != key
    # With a damaged file, the engine is measured again.
    config_json.write_text(
        config_json.read_text().replace('"hidden_size": 128', '"hidden_size": 64')
    )
    (folder() / f"{key}.json").write_text("{")
    assert Measurer(measure=measured)(role.spec, role.passes) == expected


def test_offload_is_not_measured_again(run):
    specs = []

    def measure(spec, passes) -> RoleMemory:
        specs.append(spec)
        return measured(spec, passes)

    for offload in ("false", "true"):
        one = run(80, f"critic.model.fsdp_config.optimizer_offload={offload}")
        run_memory(one.config, one.plan, one.devices, one.policy, measure)
    assert specs[:2] == specs[2:]
    assert sizing.HOST_PROCESS["cpu"] < sizing.HOST_PROCESS["cuda"]
