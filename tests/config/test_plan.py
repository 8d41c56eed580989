"""Derived numbers equal those calculated by hand."""

import pytest

from tests.config.conftest import texts
from verlite.config import make_plan
from verlite.config.compile import actor_spec, policy_loss_spec, role_spec
from verlite.config.plan import Micro, engine_settings, installed
from verlite.spec.roles import DistillationSpec


def test_batch_sizes_and_steps(material):
    # 512 prompts x 5 = 2560 samples: 320 on each of 8 devices. Mini-batches have 256 x 5 = 1280
    # samples, so there are 2 updates with 160 rows per device.
    plan = make_plan(
        material.load("data.train_batch_size=512", "actor_rollout_ref.rollout.n=5").config
    )
    assert (plan.n_devices, plan.batch_size, plan.rows_per_rank) == (8, 2560, (320, 320))
    assert (
        plan.actor.mini_prompts,
        plan.actor.mini_rows,
        plan.actor.per_epoch,
        plan.actor.per_step,
    ) == (256, 1280, 2, 2)
    assert plan.actor.mini_rows / plan.n_devices / plan.actor.micro.size == 40
    assert (plan.steps_per_epoch, plan.total_steps) == (4, 120)  # 2048 rows, 30 epochs
    assert (
        plan.sentence()
        == "512 prompts x 5 = 2560 samples / 8 devices = 320 each; 2 updates of 1280; "
        "micro-batches of 4"
    )


def test_a_mini_batch_larger_than_the_batch_is_one_update(material):
    """In verl the last, smaller part of a batch is a mini-batch, too."""
    line = ["data.train_batch_size=64", "actor_rollout_ref.rollout.n=3"]
    plan = make_plan(material.load(*line, "critic.ppo_mini_batch_size=512").config)
    for updates in (plan.actor, plan.critic):
        assert updates is not None
        assert (updates.mini_prompts, updates.mini_rows, updates.per_epoch) == (64, 192, 1)


def test_rows_need_not_divide_among_devices(material):
    plan = make_plan(
        material.load(
            "data.train_batch_size=10",
            "actor_rollout_ref.actor.ppo_mini_batch_size=5",
            "trainer.n_gpus_per_node=4",
            "actor_rollout_ref.actor.ppo_epochs=3",
            "data.train_max_samples=25",
        ).config
    )
    assert plan.rows_per_rank == (2, 3)
    assert (
        plan.sentence()
        == "10 prompts x 1 = 10 samples / 4 devices = 2 or 3 each; 2 updates of 5, 3 passes; "
        "micro-batches of 4"
    )
    assert (plan.actor.per_step, plan.train_rows, plan.steps_per_epoch, plan.total_steps) == (
        6,
        25,
        2,
        60,
    )
    assert plan.steps(19) == (1, 30)


def test_inference_is_a_role_where_it_is_placed(material):
    """It recomputes old log-probs even if the step has one update. Dtypes: a bfloat16 engine beside
    a float32 actor gets float32 weights, because inference needs them."""
    parts = [
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.rollout.n=2",
        "trainer.n_gpus_per_node=8",
        "data.train_batch_size=256",
        "actor_rollout_ref.actor.ppo_mini_batch_size=256",
        "actor_rollout_ref.actor.fsdp_config.fsdp_size=2",
        "actor_rollout_ref.actor.fsdp_config.param_offload=true",
        "actor_rollout_ref.rollout.dtype=bfloat16",
    ]
    together = make_plan(material.load(*parts).config, "cpu")
    assert not together.needs_old_log_probs and together.sync_dtype == "bfloat16"
    parts.append("cluster.component_placement={rollout: 0-3, inference: 4-5, actor: 6-7}")
    config = material.load(*parts, "actor_rollout_ref.actor.use_kl_loss=true").config
    apart = make_plan(config, "cpu")
    assert apart.roles == ("actor", "rollout", "inference", "ref")
    assert apart.placement["inference"] == apart.placement["ref"] == [4, 5]
    assert apart.needs_old_log_probs and apart.weights.engines == 4
    assert (apart.train_dtype, apart.rollout_dtype, apart.sync_dtype) == (
        "float32",
        "bfloat16",
        "float32",
    )
    assert make_plan(config, "cuda").sync_dtype == "bfloat16"
    own = engine_settings(config, "inference", "cuda")
    assert (own.model_dtype, own.fsdp_size, own.param_offload) == ("bfloat16", -1, True)
    assert engine_settings(config, "actor", "cuda").model_dtype == "float32"


def test_null_uses_actor_value(material):
    plan = make_plan(
        material.load(
            "actor_rollout_ref.actor.ppo_epochs=2",
            "actor_rollout_ref.actor.shuffle=true",
            "algorithm.use_kl_in_reward=true",
            "actor_rollout_ref.actor.loss_agg_mode=token-sum",
            "critic.forward_micro_batch_size_per_gpu=9",
            "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=7",
            "actor_rollout_ref.actor.clip_ratio_high=0.28",
        ).config
    )
    assert plan.roles == ("actor", "rollout", "ref", "critic")
    assert (
        plan.critic.epochs,
        plan.critic.shuffle,
        plan.critic.loss_agg_mode,
        plan.critic.mini_prompts,
    ) == (2, True, "token-sum", 256)
    assert (plan.log_prob_micro, plan.ref_micro) == (Micro(4, None), Micro(7, None))
    assert (plan.critic.micro, plan.value_micro) == (Micro(4, None), Micro(9, None))
    assert (plan.clip_low, plan.clip_high, plan.loss_scale) == (0.2, 0.28, 512.0)
    assert plan.critic_model_path == str(material.folder / "model")


def test_critic_overrides_actor_values(material):
    plan = make_plan(
        material.load(
            "critic.ppo_mini_batch_size=128",
            "critic.ppo_epochs=2",
            "critic.use_dynamic_bsz=true",
            "critic.ppo_max_token_len_per_gpu=4096",
            "trainer.critic_warmup=3",
        ).config
    )
    assert (plan.critic.per_epoch, plan.critic.per_step, plan.critic.mini_rows) == (8, 16, 128)
    assert plan.critic.micro == plan.value_micro == Micro(None, 4096)
    assert plan.critic_warmup == 3


def test_grpo_needs_no_critic(material):
    plan = make_plan(material.load(config_name="grpo").config)
    assert plan.roles == ("actor", "rollout", "ref")
    assert (plan.critic, plan.value_micro, plan.critic_model_path, plan.needs_greedy_baseline) == (
        None,
        None,
        None,
        False,
    )
    assert (
        make_plan(material.load("trainer.critic_warmup=3", config_name="grpo").config).critic_warmup
        == 0
    )


def test_dynamic_micro_batches(material):
    plan = make_plan(
        material.load(
            "actor_rollout_ref.actor.use_dynamic_bsz=true",
            "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=false",
        ).config
    )
    assert plan.actor.micro == Micro(None, 16384)
    assert plan.log_prob_micro == Micro(4, None)
    budgets = (
        "actor_rollout_ref.actor.use_dynamic_bsz=true",
        "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=2048",
    )
    plan = make_plan(material.load(*budgets).config)
    assert (plan.actor.micro, plan.log_prob_micro) == (Micro(None, 16384), Micro(None, 2048))


def test_explicit_values_replace_derived_values(material):
    plan = make_plan(
        material.load(
            "actor_rollout_ref.rollout.max_model_len=2000",
            "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm",
            "actor_rollout_ref.actor.loss_scale_factor=100",
            "actor_rollout_ref.rollout.dtype=bfloat16",
        ).config
    )
    assert (plan.max_model_len, plan.loss_scale, plan.train_dtype, plan.rollout_dtype) == (
        2000,
        100.0,
        "float32",
        "bfloat16",
    )
    assert make_plan(material.load().config).max_model_len == 1024


def test_placement_determines_ranks_and_engines(material):
    plan = make_plan(
        material.load(
            "cluster.component_placement={actor:0-2,rollout:3-7}",
            "trainer.nnodes=1",
            "data.train_batch_size=256",
        ).config
    )
    assert plan.placement == {"actor": [0, 1, 2], "rollout": [3, 4, 5, 6, 7], "critic": [0, 1, 2]}
    assert plan.rows_per_rank == (85, 86)
    assert plan.engines == 5
    assert ("devices", "1 x 8: actor, critic on 0-2; rollout on 3-7") in plan.lines()


def test_sequence_parallel_group_shares_rows(material):
    line = [
        "actor_rollout_ref.actor.ulysses_sequence_parallel_size=4",
        "actor_rollout_ref.actor.use_dynamic_bsz=true",
    ]
    line += [
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=2048",
        "algorithm.use_kl_in_reward=true",
        "data.train_batch_size=256",
    ]
    plan = make_plan(
        material.load(*line, "actor_rollout_ref.ref.ulysses_sequence_parallel_size=2").config
    )
    assert plan.sequence_parallel == {
        "actor": 4,
        "inference": 4,
        "ref": 2,
        "teacher": 2,
        "critic": 1,
    } and plan.rows_per_rank == (128, 128)
    found = [
        plan.actor.micro.max_tokens,
        plan.log_prob_micro.max_tokens,
        plan.ref_micro.max_tokens,
        plan.critic.micro.max_tokens,
    ]
    assert found == [4 * 2048, 4 * 2048, 2 * 2048, 2048]
    assert "256 samples / 2 groups of 4 devices = 128 each" in plan.sentence()
    assert make_plan(material.load(*line).config).sequence_parallel["ref"] == 4


def test_dtypes_depend_on_device(material):
    config = material.load().config
    assert (
        make_plan(config).device,
        make_plan(config).train_dtype,
        make_plan(config).rollout_dtype,
    ) == ("cpu", "float32", "float32")
    on_gpu = make_plan(config, device="cuda")
    assert (on_gpu.device, on_gpu.train_dtype, on_gpu.rollout_dtype) == (
        "cuda",
        "bfloat16",
        "bfloat16",
    )


@pytest.mark.skipif(not installed("vllm"), reason="needs vllm")
def test_tensor_parallel_engines(material):
    config = material.load(
        "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
    ).config
    for device in ("cuda", "cpu"):
        plan = make_plan(config, device=device)
        assert (plan.tensor_parallel, plan.engines) == (2, 4)
        assert plan.weights.devices[1] == (2, 3)


@pytest.mark.parametrize(
    ("overrides", "transport", "is_tried", "share"),
    [
        ([], "ipc", True, 1.0),
        (["free_cache_engine=false"], "ipc", True, 0.0),
        (["weight_transport=ipc"], "ipc", False, 1.0),
        (["name=tests.trainer.mortal:Mortal"], "shared_memory", False, 1.0),
        (["trainer.mode=pipelined"], "shared_memory", False, 1.0),
    ],
)
def test_auto_tries_ipc_on_gpus_for_engines_that_sleep(
    material, overrides, transport, is_tried, share
):
    rollout = "actor_rollout_ref.rollout."
    config = material.load(
        *(key if key.startswith("trainer") else rollout + key for key in overrides)
    ).config
    plan = make_plan(config, device="cuda")
    assert set(plan.weights.transport) == {transport}
    assert (plan.weights.fallback is not None) == is_tried
    assert actor_spec(config, plan, 1).publish.engine_share == share


def test_validation_schedule(material):
    val = f"data.val_files={material.folder}/test.parquet"
    plain = make_plan(material.load().config)
    with_files = make_plan(material.load(val).config)
    assert (plain.validates_first, plain.val_rows) == (False, None)
    assert (with_files.validates_first, with_files.val_rows) == (True, 300)
    only = make_plan(
        material.load(val, "trainer.val_only=true", "trainer.val_before_train=false").config
    )
    assert only.validates_first
    assert make_plan(material.load(val, "data.val_max_samples=7").config).val_rows == 7
    later = material.load(val, "trainer.val_before_train=false", "trainer.test_freq=5").config
    assert not make_plan(later).validates_first


def test_plan_without_row_counts(material):
    plan = make_plan(material.load().config, count_rows=False)
    assert (plan.train_rows, plan.steps_per_epoch, plan.total_steps) == (None, None, None)
    assert (
        make_plan(
            material.load("trainer.total_training_steps=9").config, count_rows=False
        ).total_steps
        == 9
    )
    both = material.load("trainer.total_training_steps=9", "trainer.total_epochs=1").config
    assert make_plan(both, count_rows=False).total_steps is None


LENGTHS = [
    # 2048 rows in batches of 512 are 4 steps per epoch. verl's epoch loop ends after total_epochs,
    # and inside it after total_training_steps; null is 30 epochs there as here.
    ("", 120, ""),
    ("trainer.total_epochs=3", 12, ""),
    ("trainer.total_training_steps=500", 500, ""),
    (
        "trainer.total_epochs=3 trainer.total_training_steps=11",
        11,
        "trainer.total_training_steps=11 ends the run, not trainer.total_epochs=3 (12 steps)",
    ),
    (
        "trainer.total_epochs=3 trainer.total_training_steps=13",
        12,
        "trainer.total_epochs=3 (12 steps) ends the run, not trainer.total_training_steps=13, the "
        "length of learning-rate schedules",
    ),
]


@pytest.mark.parametrize("given, steps, note", LENGTHS)
def test_the_run_ends_with_epochs_or_steps_whichever_is_first(material, given, steps, note):
    loaded = material.load("data.train_batch_size=512", *given.split())
    assert not [name for name in texts(loaded) if "total_" in name]
    plan = make_plan(loaded.config)
    assert (plan.steps(2048), plan.total_steps) == ((4, steps), steps)
    shown = f"{steps} steps (2048 prompts, 4 steps per epoch)"
    assert dict(plan.lines())["length"] == (f"{shown}; {note}" if note else shown)


NEEDS_OLD_LOG_PROBS = [
    ("", True),  # four updates per step
    ("{actor}ppo_mini_batch_size=1024", False),
    ("{actor}ppo_mini_batch_size=1024 {actor}ppo_epochs=2", True),
    ("{actor}ppo_mini_batch_size=1024 algorithm.use_kl_in_reward=true", True),
    ("{actor}ppo_mini_batch_size=1024 algorithm.rollout_correction.preset=icepop", True),
    ("{actor}ppo_mini_batch_size=1024 algorithm.rollout_correction.preset=disabled", False),
    ("{actor}ppo_mini_batch_size=1024 {actor}policy_loss.loss_mode=kl_cov", True),
    (
        "{actor}ppo_mini_batch_size=1024 {rollout}n=2 "
        "algorithm.adv_estimator=optimal_token_baseline",
        True,
    ),
    ("{actor}ppo_mini_batch_size=1024 algorithm.adv_estimator=mine:f", True),
    ("{actor}ppo_mini_batch_size=1024 {rollout}n=2 algorithm.adv_estimator=rloo", False),
]


@pytest.mark.parametrize(("settings", "needed"), NEEDS_OLD_LOG_PROBS)
def test_old_log_probs_are_computed_if_needed(material, settings, needed):
    settings = settings.format(
        actor="actor_rollout_ref.actor.", rollout="actor_rollout_ref.rollout."
    ).split()
    assert make_plan(material.load(*settings).config).needs_old_log_probs is needed


def test_bypass_mode_skips_old_log_probs(material):
    plan = make_plan(material.load("algorithm.rollout_correction.preset=bypass_pg_is").config)
    assert (plan.loss_mode, plan.needs_old_log_probs, plan.correction.loss_type) == (
        "bypass_mode",
        False,
        "reinforce",
    )
    assert make_plan(material.load().config).loss_mode == "vanilla"


def test_preset_equals_its_keys(material):
    prefix = "algorithm.rollout_correction."
    written = [
        f"{prefix}rollout_is=token",
        f"{prefix}rollout_rs=seq_mean_k3",
        f"{prefix}rollout_rs_threshold=0.01",
    ]
    named = make_plan(material.load(f"{prefix}preset=decoupled_k3_rs_token_tis").config).correction
    keyed = make_plan(material.load(*written).config).correction
    for name in (
        "rollout_is",
        "is_band",
        "is_truncated",
        "rejections",
        "bypass_mode",
        "loss_type",
        "acts_on_batch",
    ):
        assert getattr(named, name) == getattr(keyed, name), name
    two = material.load(
        f"{prefix}rollout_rs=[token_k1,seq_max_k3]", f"{prefix}rollout_rs_threshold=[0.5_2.0,3]"
    ).config
    assert [name for name, _, _ in make_plan(two).correction.rejections] == [
        "token_k1",
        "seq_max_k3",
    ]


def test_lora_actor_is_the_reference(material):
    model = "actor_rollout_ref.model."
    kl = "actor_rollout_ref.actor.use_kl_loss=true"
    for options in (
        [f"{model}lora_rank=8"],
        [f"{model}lora_adapter_path={material.folder}/adapter"],
    ):
        plan = make_plan(material.load(kl, *options).config)
        assert plan.needs_reference and plan.reference_is_actor and plan.ref_micro is not None
        assert plan.roles == ("actor", "rollout", "critic") and "ref" not in plan.placement
        assert not make_plan(material.load(*options).config).reference_is_actor
    assert not make_plan(material.load(kl).config).reference_is_actor
    shown = dict(make_plan(material.load(f"{model}lora_rank=8").config).lines())["model"]
    assert shown == f"{material.folder}/model, LoRA of rank 8 (alpha 16)"


def test_teacher_is_a_role_with_a_model_of_its_own(material):
    """A policy with adapters has a reference that is itself, and a teacher without adapters."""
    section = "distillation.teacher_models.teacher_model."
    teacher = ["distillation.enabled=true", f"{section}model_path={material.folder}/model"]
    options = [
        "actor_rollout_ref.model.lora_rank=8",
        "actor_rollout_ref.model.use_remove_padding=false",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=7",
        "actor_rollout_ref.ref.fsdp_config.param_offload=true",
    ]
    config = material.load(*teacher, *options).config
    plan = make_plan(config)
    assert plan.roles == ("actor", "rollout", "teacher", "critic")
    assert plan.placement["teacher"] == plan.placement["actor"] and not plan.reference_is_actor
    assert plan.teacher == f"{material.folder}/model" and plan.ref_micro == Micro(7, None)
    spec = role_spec("teacher", config, plan, 9)
    assert spec.micro == Micro(7, None) and spec.engine.optim is None
    model = spec.engine.model
    assert (model.path, model.trains_adapters) == (f"{material.folder}/model", False)
    assert not model.use_remove_padding and spec.engine.fsdp.param_offload
    assert policy_loss_spec(config, plan).distillation == DistillationSpec(
        "k3", False, True, 1.0, None, None
    )
    urls = f"{section}url=[http://a:8001,http://b:8001]"
    config = material.load("distillation.enabled=true", urls).config
    plan = make_plan(config)
    assert plan.roles == ("actor", "rollout", "critic") and plan.ref_micro is None
    assert plan.teacher is None and plan.teacher_urls == ["http://a:8001", "http://b:8001"]
    assert "teacher by the service at http://a:8001" in dict(plan.lines())["forward passes"]
    config = material.load(urls, *teacher[1:]).config
    plan = make_plan(config)
    assert "teacher" not in plan.roles and not plan.teacher_urls
    assert policy_loss_spec(config, plan).distillation is None


def test_reference_service_needs_no_devices(material):
    urls = "actor_rollout_ref.ref.url=[http://a:8001,http://b:8001]"
    kl = "actor_rollout_ref.actor.use_kl_loss=true"
    plan = make_plan(material.load(kl, urls).config)
    assert plan.needs_reference and plan.reference_urls == ["http://a:8001", "http://b:8001"]
    assert "ref" not in plan.roles and "ref" not in plan.placement and plan.ref_micro is None
    shown = dict(plan.lines())["forward passes"]
    assert "reference by the service at http://a:8001,http://b:8001" in shown
    assert make_plan(material.load(urls).config).reference_urls == []  # no KL term
    lora = make_plan(material.load(kl, urls, "actor_rollout_ref.model.lora_rank=8").config)
    assert lora.reference_urls == [] and lora.reference_is_actor
    local = make_plan(material.load(kl).config)
    assert "ref" in local.roles and local.reference_urls == []


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("log_prob_micro_batch_size_per_gpu", 2),
        ("log_prob_use_dynamic_bsz", "false"),
        ("ulysses_sequence_parallel_size", 1),
        ("fsdp_config.param_offload", "true"),
    ],
)
def test_settings_of_the_local_reference_have_no_effect_with_a_service(material, key, value):
    kl = "actor_rollout_ref.actor.use_kl_loss=true"
    setting = f"actor_rollout_ref.ref.{key}={value}"
    url = "actor_rollout_ref.ref.url=http://a:8001"
    assert not any(key in str(note) for note in material.load(kl, setting).notes)
    assert any(key in str(note) for note in material.load(kl, setting, url).notes)


def test_settings_of_the_service_have_no_effect_without_one(material):
    kl = "actor_rollout_ref.actor.use_kl_loss=true"
    notes = material.load(kl, "actor_rollout_ref.ref.timeout_s=5").notes
    assert any("timeout_s" in str(note) for note in notes)
    lora = "actor_rollout_ref.model.lora_rank=8"
    notes = material.load(kl, lora, "actor_rollout_ref.ref.url=http://a:8001").notes
    assert any("ref.url" in str(note) for note in notes)


def test_servers_need_no_device(material):
    """The rollout process is beside the actor's first rank, and no picture, table or memory of
    devices has it."""
    urls = ["http://gpu004:8000", "http://gpu005:8000"]
    parts = (
        "actor_rollout_ref.rollout.name=server",
        f"actor_rollout_ref.rollout.servers=[{','.join(urls)}]",
        "cluster.component_placement={actor:2-7,critic:0-1}",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=4",
    )
    plan = make_plan(material.load(*parts).config, "cuda")
    assert plan.servers == tuple(urls)
    assert plan.roles == ("actor", "rollout", "critic")
    assert plan.device_roles == ("actor", "critic")
    assert plan.placement["rollout"] == [2]
    assert (plan.engines, plan.tensor_parallel) == (1, 1)
    assert plan.weights.transport == ("files",) and not plan.weights.is_streaming
    lines = dict(plan.lines())
    assert lines["rollout"].startswith("server, 2 vLLM servers with devices of their own: http://")
    assert lines["devices"] == "1 x 8: actor on 2-7; critic on 0-1"
    assert lines["weight sync"] == "files"
    assert "R" not in plan.drawing.split("A = ")[0]
    network = (*parts, "actor_rollout_ref.rollout.weight_transport=collective")
    for device in ("cuda", "cpu"):
        plan = make_plan(material.load(*network).config, device)
        assert plan.weights.transport == ("shared_memory",)
        assert dict(plan.lines())["weight sync"] == "shared_memory; collective to each server"


@pytest.mark.parametrize(
    ("frequency", "words"),
    [(5, "save every 5 steps"), (-1, "only a stop saves a checkpoint (trainer.save_freq=-1)")],
)
def test_the_table_says_when_checkpoints_are_saved(material, frequency, words):
    lines = dict(make_plan(material.load(f"trainer.save_freq={frequency}").config).lines())
    assert lines["run"].endswith(f", {words}")
