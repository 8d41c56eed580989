"""What is said about wrong placements on 4 nodes with 8 devices each."""

import pytest

from verlite.config import ConfigError

PLACEMENT = "cluster.component_placement"
GROUPS = "cluster.node_groups"
SIZE = "actor_rollout_ref.rollout.tensor_model_parallel_size"
TRANSPORT = "actor_rollout_ref.rollout.weight_transport"
VLLM = "actor_rollout_ref.rollout.name=vllm"
A100 = f"{GROUPS}=[{{label:a100,node_ranks:0-1}}]"
REMEDIES = {
    PLACEMENT: "Devices are 0-31, 8 per machine.",
    GROUPS: "trainer.nnodes=4. docs/cluster.md describes the keys.",
    TRANSPORT: "auto chooses a transport for each engine.",
}

PLACEMENTS = [
    ("{rollout:all}", "'actor' is not placed"),
    (
        "{actor:all,judge:0-3}",
        "'judge' is not a role; the roles are actor, rollout, inference, ref, teacher, critic",
    ),
    ("{actor:all,actor_inference:4,inference:5}", "'inference' is placed twice"),
    ("{actor:0-31,rollout:0-32}", "rollout: '0-32' names device 32, but there are 32: 0-31"),
    ("{actor:31-0}", "actor: '31-0': the range ends before it starts"),
    ("{actor:[16-31,0-15]}", "actor: '16-31,0-15' must name devices once and in ascending order"),
    ("{actor:[0-16,16-31]}", "actor: '0-16,16-31' must name devices once and in ascending order"),
    ("{actor:16-31,0-15}", "a list inside {...} needs brackets, such as {actor: [0-3, 6]}"),
    ("{actor:0..31}", "actor: '0..31' is neither a number, a range such as 0-3, nor all"),
    ('{actor:""}', "actor: '' names no device"),
    (
        "{actor:1.5,rollout:null}",
        "actor: expected a list of devices such as 0-3, got 1.5",
        "rollout: expected a list of devices such as 0-3, got null",
    ),
    (
        '{"actor,rollout": 3:2}',
        "actor,rollout: '182' names device 182, but there are 32: 0-31 (YAML reads 3:2 without "
        "quotes as 182)",
    ),
    ("{actor:0-31:1-32}", "actor: '0-31:1-32' starts at process 1, but the first process is 0"),
    (
        "{actor:[0-15:0-15,16-31:17-32]}",
        "actor: '16-31:17-32' starts at process 17, but the next process is 16",
    ),
    (
        "{actor:0-31:0-63}",
        "actor: '0-31:0-63' puts 64 processes on 32 devices, but each process uses one device",
    ),
    (
        "{actor:0-31:0-15}",
        "actor: '0-31:0-15' puts 16 processes on 32 devices, but each process uses one device",
    ),
    (
        "{actor:0-31:all}",
        "actor: '0-31:all': all stands for devices, not for processes; write a range",
    ),
    (
        "{actor:{node_group:a100,placement:0-7},rollout:all}",
        "actor: node_group 'a100' does not exist; the groups are cluster",
    ),
    (
        "{actor:all,judge:0,rollout:{node_group:cluster,placement:[0-7:1-8,40]}}",
        "'judge' is not a role; the roles are actor, rollout, inference, ref, teacher, critic",
        "rollout: '0-7:1-8' starts at process 1, but the first process is 0",
        "rollout: '40' names device 40, but node_group cluster has 32: 0-31",
    ),
]


@pytest.mark.parametrize("case", PLACEMENTS, ids=[placement for placement, *_ in PLACEMENTS])
def test_wrong_placement(material, case):
    placement, *rules = case
    assert problems(material, f"{PLACEMENT}={placement}") == [(PLACEMENT, rule) for rule in rules]


LINES = [
    (
        f"{A100} {PLACEMENT}={{actor:{{node_group:a100,placement:0-16}},rollout:all}}",
        (PLACEMENT, "actor: '0-16' names device 16, but node_group a100 has 16: 0-15"),
    ),
    (
        f"{A100} {PLACEMENT}={{actor:{{node_group:[a100,cluster],placement:all}}}}",
        (PLACEMENT, "actor: node 0 is in several of the groups a100,cluster"),
    ),
    (
        f"{A100} {PLACEMENT}={{actor:{{node_group:node,placement:0-1}}}}",
        (
            PLACEMENT,
            "actor: node_group 'node' has nodes without devices, and every role here needs devices",
        ),
    ),
    (
        f"{PLACEMENT}={{actor:{{node_group:cluster}},rollout:{{group:a100,placement:all}}}}",
        (PLACEMENT, "actor: 'placement' is missing"),
        (PLACEMENT, "rollout: 'group' is not a key; the keys are node_group and placement"),
    ),
    (
        f"{GROUPS}=[{{label:cluster,node_ranks:0-4,hardware:{{type:Franka}}}},{{label:b}}]",
        (GROUPS, "group 'cluster': label 'cluster' is reserved"),
        (
            GROUPS,
            "group 'cluster': hardware is not supported; roles run on the GPUs or CPU slots of the "
            "nodes",
        ),
        (GROUPS, "group 'cluster': node_ranks: '0-4' names node 4, but there are 4: 0-3"),
        (GROUPS, "group 'b': node_ranks is missing"),
    ),
    (
        f"{GROUPS}=[{{label:b,node_ranks:0-1,env_configs:[{{node_ranks:0-2,"
        "env_vars:[{RAY_X:1},{A:b},{A:c},{HF_TOKEN:d}]},{node_ranks:0,env_var:{}}]},{label:b,node_ranks:2}]",
        (GROUPS, "group 'b': env_configs: node 2 is not in the group"),
        (
            GROUPS,
            "group 'b': env_configs: env_vars: RAY_X is set by Ray or verlite; set it before "
            "`ray start`",
        ),
        (GROUPS, "group 'b': env_configs: env_vars: A is given twice"),
        (
            GROUPS,
            "group 'b': env_configs: env_vars: HF_TOKEN looks like a secret; set it before "
            "`ray start`",
        ),
        (
            GROUPS,
            "group 'b': env_configs: 'env_var' is not a key; the keys are node_ranks, env_vars, "
            "python_interpreter_path",
        ),
        (GROUPS, "group 'b': env_configs: node 0 has two environments"),
        (GROUPS, "group 'b': label 'b' is given twice"),
    ),
    (f"{GROUPS}=fast", (GROUPS, "expected a list of groups, got 'fast'")),
    (
        f"{GROUPS}=[{{label:null,node_ranks:0-3}}]",
        (GROUPS, "group [0]: label must be a name without spaces and commas"),
    ),
    (
        f"{VLLM} {SIZE}=2 {PLACEMENT}={{actor:all,rollout:0-31:0-31}}",
        (
            PLACEMENT,
            "rollout: '0-31:0-31' puts 32 processes on 32 devices, but each process uses 2 devices "
            "(rollout.tensor_model_parallel_size)",
        ),
    ),
    (
        f"{TRANSPORT}=ipc {PLACEMENT}={{actor:0-15,rollout:12-31}}",
        (TRANSPORT, "device 16 has an engine but no actor rank"),
    ),
]


@pytest.mark.parametrize("case", LINES, ids=[line for line, *_ in LINES])
def test_wrong_groups_and_lines(material, case):
    line, *expected = case
    assert problems(material, *line.split(" ")) == expected


IDLE = [
    # A user of guide 004's disaggregated layout forgets 20-23, and one types 22 for 23.
    (
        "{actor:24-31,rollout:0-19}",
        "no role runs on 4 of 32 devices: 20-23 (actor on 24-31, rollout on 0-19, critic on 24-31)",
    ),
    (
        "{actor:24-31,rollout:0-19,ref:20-23}",
        "no role runs on 4 of 32 devices: 20-23 (actor on 24-31, rollout on 0-19, critic on 24-31; "
        "this run has no ref)",
    ),
    (
        '{"actor,rollout,critic":"0-6,8-31"}',
        "no role runs on 1 of 32 devices: 7 (actor on 0-6,8-31, rollout on 0-6,8-31, critic on "
        "0-6,8-31)",
    ),
]


@pytest.mark.parametrize(("placement", "rule"), IDLE)
def test_device_without_a_role(material, placement, rule):
    with pytest.raises(ConfigError) as error:
        material.load("trainer.nnodes=4", f"{PLACEMENT}={placement}")
    (problem,) = error.value.problems
    assert (problem.key, problem.rule) == (PLACEMENT, rule)
    assert problem.remedy == (
        "Place a role on every device, or lower trainer.nnodes or trainer.n_gpus_per_node."
    )


@pytest.mark.parametrize(
    ("rollout", "rule"),
    [
        ("2-20", "must divide the 19 rollout devices"),
        ("2-21", "an engine on devices 6-9 would span two machines of 8 devices"),
        ("[2-5,7-8,10-19]", "an engine on devices 7-8,10-11 would span two machines of 8 devices"),
    ],
)
def test_engine_on_two_nodes_and_idle_device_are_both_reported(material, rollout, rule):
    with pytest.raises(ConfigError) as error:
        line = f"{PLACEMENT}={{actor:22-31,rollout:{rollout}}}"
        material.load("trainer.nnodes=4", VLLM, f"{SIZE}=4", line)
    found = {problem.key: problem.rule for problem in error.value.problems}
    assert found[SIZE] == rule
    assert found[PLACEMENT].startswith("no role runs on")


def problems(material, *line):
    with pytest.raises(ConfigError) as error:
        material.load("trainer.nnodes=4", *line)
    found = [problem for problem in error.value.problems if problem.key != VLLM.split("=")[0]]
    assert all(problem.remedy == REMEDIES[problem.key] for problem in found)
    return [(problem.key, problem.rule) for problem in found]
