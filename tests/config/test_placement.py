import pytest

from verlite.config.placement import devices, parse

ROLES = ("actor", "rollout", "ref", "critic")


def test_default_places_all_roles_on_all_devices():
    assert parse(None, ("actor", "rollout"), 3) == {"actor": [0, 1, 2], "rollout": [0, 1, 2]}


def test_unplaced_role_uses_actor_devices():
    placed = parse({"actor, critic": "0-3", "rollout": "4-5,7"}, ROLES, 8)
    assert placed == {
        "actor": [0, 1, 2, 3],
        "critic": [0, 1, 2, 3],
        "rollout": [4, 5, 7],
        "ref": [0, 1, 2, 3],
    }


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("all", [0, 1, 2, 3]),
        ("ALL:0-3", [0, 1, 2, 3]),
        ("2", [2]),
        ("0-1:0-1,3:2", [0, 1, 3]),
        ("0, 2-3,", [0, 2, 3]),
    ],
)
def test_device_list_is_parsed(text, expected):
    assert devices(text, 4) == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0-4", "names device 4, but there are 4: 0-3"),
        ("2-1", "runs backwards"),
        ("1,0", "ascending order"),
        ("0-2,2", "once"),
        ("x", "neither a number"),
        ("", "names no device"),
        ("-1", "neither a number"),
        ("0-1:5-6", "starts at process 5, but the next process is 0"),
        ("0-1:0,2:1", "puts 1 processes on 2 devices"),
        ("0-1:all", "neither a number"),
    ],
)
def test_invalid_device_list_is_reported(text, words):
    with pytest.raises(ValueError, match="device|process|number|order|backwards|once") as error:
        devices(text, 4)
    assert words in str(error.value)


def test_all_placement_problems_are_reported_together():
    with pytest.raises(ValueError, match="not a role") as error:
        parse({"rollout": "9", "rollout,judge": "0"}, ROLES, 4)
    assert str(error.value).splitlines() == [
        "rollout: '9' names device 9, but there are 4: 0-3",
        "'rollout' is placed twice",
        "'judge' is not a role of this run; its roles are actor, rollout, ref, critic",
        "'actor' is not placed",
    ]
