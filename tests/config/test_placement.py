import pytest

from verlite.config.placement import Shape, draw, mode, parse, read_numbers


def test_default_places_all_roles_on_all_devices():
    everything = [0, 1, 2]
    assert parse(None, Shape(1, 3)) == dict.fromkeys(
        ("actor", "rollout", "ref", "teacher", "critic"), everything
    )


def test_unplaced_role_uses_actor_devices():
    placed = parse({"actor, critic": "0-3", "rollout": "4-5,7"}, Shape(2, 4))
    assert placed == {
        "actor": [0, 1, 2, 3],
        "critic": [0, 1, 2, 3],
        "rollout": [4, 5, 7],
        "ref": [0, 1, 2, 3],
        "teacher": [0, 1, 2, 3],
    }


def test_reference_shares_the_devices_of_inference():
    spec = {"rollout": "0-1", "actor_inference": 2, "actor": [3, "4-5"], "reward": "all"}
    assert parse(spec, Shape(1, 6)) == {
        "actor": [3, 4, 5],
        "rollout": [0, 1],
        "inference": [2],
        "ref": [2],
        "teacher": [2],
        "critic": [3, 4, 5],
    }
    assert parse({**spec, "ref": "3-5"}, Shape(1, 6))["ref"] == [3, 4, 5]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("all", [0, 1, 2, 3]),
        ("ALL:0-3", [0, 1, 2, 3]),
        ("2", [2]),
        ("0-1:0-1,3:2", [0, 1, 3]),
        ("0, 2-3,", [0, 2, 3]),
        (1, [1]),
        ([0, "2-3"], [0, 2, 3]),
    ],
)
def test_device_list_is_parsed(text, expected):
    assert read_numbers(text, 4) == (expected, [])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0-4", "names device 4, but there are 4: 0-3"),
        ("2-1", "ends before it starts"),
        ("1,0", "ascending order"),
        ("0-2,2", "once"),
        ("x", "neither a number"),
        ("", "names no device"),
        ("-1", "neither a number"),
        ("0-1:0,2:1", "puts 1 process on 2 devices"),
    ],
)
def test_invalid_device_list_is_reported(text, words):
    _, problems = read_numbers(text, 4)
    assert words in "; ".join(problems)


def test_all_placement_problems_are_reported_together():
    with pytest.raises(ValueError, match="not a role") as error:
        parse({"rollout": "9", "rollout,judge": "0"}, Shape(1, 4))
    assert str(error.value).splitlines() == [
        "rollout: '9' names device 9, but there are 4: 0-3",
        "'rollout' is placed twice",
        "'judge' is not a role; the roles are actor, rollout, inference, ref, teacher, critic",
        "'actor' is not placed",
    ]


def test_engines_take_several_devices():
    shape = Shape(1, 8, engine=2)
    assert parse({"actor": "all:0-7", "rollout": "0-3:0-1,4-7:2-3"}, shape)["rollout"] == [
        *range(8)
    ]


def test_group_numbers_run_through_the_listed_groups():
    shape = Shape(3, 2, groups={"a": [2], "b": [0]})
    spec = {
        "actor": {"node_group": "a, b", "placement": "1-2"},
        "rollout": {"node_group": ["b", "a"], "placement": [0, 3]},
        "critic": {"placement": "all"},
    }
    placed = parse(spec, shape)
    assert (placed["actor"], placed["rollout"]) == ([5, 0], [0, 5])
    assert placed["critic"] == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("placement", "expected"),
    [
        ({"actor": [0, 1], "rollout": [0, 1], "ref": [0, 1]}, "collocated"),
        ({"actor": [0, 1], "rollout": [0, 1], "ref": [0]}, "hybrid"),
        ({"actor": [0], "rollout": [1, 2], "inference": [3], "ref": [3]}, "disaggregated"),
        ({"actor": [0], "rollout": [1, 2], "inference": [2]}, "hybrid"),
        ({"actor": [0, 1], "rollout": [1, 2]}, "hybrid"),
    ],
)
def test_mode(placement, expected):
    assert mode(placement) == expected


def test_picture_of_a_small_and_a_large_cluster():
    guide = {"actor": range(24, 32), "rollout": range(20), "inference": range(20, 24)}
    assert draw({**guide, "ref": guide["inference"]}, 4, 8).splitlines() == [
        "disaggregated: actor, rollout and inference on devices of their own",
        "node   0 1 2 3 4 5 6 7",
        "0-1    R R R R R R R R",
        "2      R R R R I I I I",
        "3      A A A A A A A A",
        "A actor   R rollout   I inference, ref",
    ]
    large = {"actor": range(512), "rollout": range(256, 1024), "critic": range(512)}
    assert draw(large, 128, 8, {"old": range(64)}).splitlines() == [
        "hybrid: some roles share devices",
        "node          0  1  2  3  4  5  6  7",
        "0-31 (old)    A  A  A  A  A  A  A  A",
        "32-63 (old)   AR AR AR AR AR AR AR AR",
        "64-127        R  R  R  R  R  R  R  R",
        "A actor, critic   R rollout",
    ]
    assert draw({"actor": range(40), "rollout": range(20, 64)}, 2, 32).splitlines()[1:4] == [
        "node   devices",
        "0      A 0-19, AR 20-31",
        "1      AR 0-7, R 8-31",
    ]
