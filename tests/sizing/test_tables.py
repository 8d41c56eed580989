"""The table of roles on devices, and what a weight sync brings to each node."""

from dataclasses import replace

import pytest

from verlite.config.compile import model_spec
from verlite.sizing.devices import Devices, DevicesError, choose_devices, parse_devices
from verlite.sizing.facts import model_facts
from verlite.sizing.memory import DeviceGroup, Phase, sync_bytes
from verlite.sizing.tables import group_table, node_roles, placement_table


def text_of(table, width: int = 160) -> str:
    from rich.console import Console

    console = Console(width=width)
    with console.capture() as captured:
        console.print(table)
    return captured.get()


def test_each_device_shows_its_rank_and_engine(planned):
    _, plan = planned(
        "tiny",
        "trainer.nnodes=2",
        "trainer.n_gpus_per_node=4",
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.rollout.n=2",
        "cluster.component_placement={rollout: 0-5, actor: 4-7}",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
    )
    first, second = node_roles(plan)
    assert first.cells == {"rollout": ["e0", "e0", "e1", "e1"]}
    assert second.cells == {"actor": ["0", "1", "2", "3"], "rollout": ["e2", "e2", None, None]}
    shown = [line.split() for line in text_of(placement_table(plan)).splitlines()]
    cells = [[word for word in line if word != "│"] for line in shown]
    assert ["rollout", "e2", "e2", "-", "-"] in cells
    assert ["0", "rollout", "e0", "e0", "e1", "e1"] in cells


def test_wide_nodes_are_shown_as_ranges(planned):
    _, plan = planned("tiny", "trainer.n_gpus_per_node=64")
    shown = text_of(placement_table(plan))
    assert "0-63" in shown and "0 to 63" in shown and "e0 to e63" in shown


def test_a_sync_brings_one_copy_to_each_node(planned):
    config, plan = planned(
        "qwen2.5-7b",
        "trainer.nnodes=2",
        "cluster.component_placement={actor: 0-7, rollout: all}",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=4",
    )
    moved = sync_bytes(plan, model_facts(model_spec(config.actor_rollout_ref.model)))
    assert moved.whole == 2 * 7_615_616_512 and moved.per_device == moved.whole // 4
    for sync, first in ((moved, "ipc"), (moved.fallback, "shared_memory")):
        assert [(use.transport, use.readers, use.nodes) for use in sync.uses] == [
            (first, "2 engines", [0]),
            ("collective", "2 engines", [1]),
        ]
    labels = [name for name, _ in moved.lines()]
    assert labels == ["weights", "ipc", "collective", "if ipc fails", "if ipc fails"]
    assert moved.host_bytes(0) == moved.host_bytes(1) == moved.whole


def test_each_inference_rank_loads_its_shard(planned):
    config, plan = planned(
        "qwen2.5-7b",
        "trainer.nnodes=2",
        "cluster.component_placement={actor: 0-7, rollout: 8-11, inference: 12-15}",
    )
    moved = sync_bytes(plan, model_facts(model_spec(config.actor_rollout_ref.model)))
    assert [(use.readers, use.nodes, use.per_device) for use in moved.uses] == [
        ("4 engines", [1], moved.whole),
        ("4 inference ranks", [1], moved.whole // 4),
    ]
    assert moved.host_bytes(1) == moved.whole and moved.host_bytes(0) == 0


def test_adapters_that_are_sent_alone_are_a_line_of_their_own(planned):
    overrides = (
        "actor_rollout_ref.model.lora_rank=4",
        "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.rollout.lora_sync=",
    )
    lines = {}
    for kind in ("merged", "adapter"):
        config, plan = planned("tiny", *overrides[:2], overrides[2] + kind)
        facts = model_facts(model_spec(config.actor_rollout_ref.model))
        lines[kind] = dict(sync_bytes(plan, facts).lines())
    assert lines["adapter"].keys() - lines["merged"].keys() == {"later syncs"}
    assert str(facts.trained) in lines["adapter"]["later syncs"].replace(",", "")


def test_within_a_gpu_nothing_stays_in_the_host(planned):
    config, plan = planned("tiny", "actor_rollout_ref.rollout.weight_transport=ipc")
    moved = sync_bytes(plan, model_facts(model_spec(config.actor_rollout_ref.model)))
    assert [use.transport for use in moved.uses] == ["ipc"] and moved.host_bytes(0) == 0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("8xH100-80GB", (8, "H100-80GB", 84_932_978_278)),
        ("16 x h100-80gb", (16, "H100-80GB", 84_932_978_278)),
        ("4x24GB", (4, "24 GiB", 24 * 2**30)),
    ],
)
def test_devices_are_read(text, expected):
    assert parse_devices(text) == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("H100", 'such|as in "8xH100-80GB"'),
        ("8xH100", "H100 is not in the table of devices. Write H100-80GB"),
        ("8xBanana", "Banana is not in the table of devices"),
        ("0xH100-80GB", "number of devices"),
        ("8x0GB", "more than 0 GiB"),
    ],
)
def test_unknown_devices_are_named(text, words):
    with pytest.raises(DevicesError, match=words):
        parse_devices(text)


def test_devices_must_be_those_of_the_configuration(planned):
    _, plan = planned("tiny", "trainer.nnodes=2")
    for text in ("8xH100-80GB", "16xH100-80GB"):
        assert choose_devices(text, plan).count == 8
    with pytest.raises(DevicesError, match=r"has 4 devices, but trainer.n_gpus_per_node=8"):
        choose_devices("4xH100-80GB", plan)


def test_gpus_are_refused_for_a_run_on_cpus(planned):
    _, plan = planned("tiny")
    with pytest.raises(DevicesError, match="are GPUs, but trainer.device=cpu"):
        choose_devices("8xH100-80GB", replace(plan, device="cpu"))


def test_phases_on_gpus_show_what_is_free():
    phases = [Phase("update", {"actor": 60 << 30}, 10 << 30), Phase("load", {"actor": 81 << 30}, 0)]
    group = DeviceGroup([0], ["actor"], phases)
    shown = text_of(group_table(group, Devices("GPU", 1, 80 << 30, "cuda")))
    assert "of 80.0" in shown and "10.0 free" in shown and "1.0 OVER" in shown
    assert "free" not in text_of(group_table(group, Devices("CPU slots", 1, 80 << 30, "cpu")))
