"""Cores, their division among processes, and how OpenMP's threads wait."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from verlite import threads

LIBRARY = "OMP_DISPLAY_ENV"
"""With VERBOSE, libgomp prints its settings when it is loaded."""
VARIABLES = (*threads.CHOICES, threads.COUNT, threads.OURS, threads.TORCHRUN)


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test begins without any of the variables, and changes none of the process."""
    monkeypatch.setattr(os, "environ", {k: v for k, v in os.environ.items() if k not in VARIABLES})


def machine(root: Path, cgroup: str, files: dict[str, str]) -> Path:
    """Write /proc/self/cgroup and files of /sys/fs/cgroup below `root`."""
    for name, text in {"proc/self/cgroup": cgroup, **files}.items():
        path = root / (name if name.startswith("proc") else f"sys/fs/cgroup/{name}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


def test_another_host_does_not_get_verlites_own_number():
    user = {threads.COUNT: "3", "HOME": "/h"}
    assert threads.undivided(user) == user
    assert threads.undivided(user | {threads.OURS: "3"}) == {"HOME": "/h"}
    assert threads.undivided(user | {threads.OURS: "8"}) == user, "the user has changed it since"


V1 = "9:name=systemd:/\n4:cpu,cpuacct:/docker/ab\n3:cpuset:/docker/ab\n"


@pytest.mark.parametrize(
    "cgroup, files, expected",
    [
        ("", {}, None),
        ("0::/\n", {"cpu.max": "max 100000\n"}, None),
        ("0::/\n", {"cpu.max": "150000 100000\n"}, 1.5),
        ("0::/\n", {"cpu.max": "not a number\n"}, None),
        # A group has at most what those above it have.
        (
            "0::/a/b\n",
            {
                "a/cpu.max": "300000 100000\n",
                "a/b/cpu.max": "800000 100000\n",
                "a/other/cpu.max": "100000 100000\n",
            },
            3.0,
        ),
        ("0::/a/b\n", {"a/cpu.max": "max 100000\n", "a/b/cpu.max": "25000 50000\n"}, 0.5),
        # A container sees its group as the root, under the machine's name.
        ("0::/docker/ab\n", {"cpu.max": "400000 100000\n"}, 4.0),
        (V1, {"cpu/cpu.cfs_quota_us": "250000", "cpu/cpu.cfs_period_us": "100000"}, 2.5),
        (V1, {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        (
            V1,
            {
                "cpu,cpuacct/cpu.cfs_quota_us": "-1",
                "cpu,cpuacct/cpu.cfs_period_us": "100000",
                "cpu,cpuacct/docker/ab/cpu.cfs_quota_us": "600000",
                "cpu,cpuacct/docker/ab/cpu.cfs_period_us": "200000",
            },
            3.0,
        ),
        # Other controllers' groups do not count.
        (
            "4:memory:/m\n",
            {"cpu/m/cpu.cfs_quota_us": "100000", "cpu/m/cpu.cfs_period_us": "100000"},
            None,
        ),
    ],
)
def test_the_cpu_quota(
    tmp_path: Path, cgroup: str, files: dict[str, str], expected: float | None
) -> None:
    assert threads.quota(machine(tmp_path, cgroup, files)) == expected


def test_without_proc_there_is_no_quota(tmp_path: Path) -> None:
    assert threads.quota(tmp_path) is None


@pytest.mark.parametrize(
    "affinity, cpu_max, expected",
    [(8, "max", 8), (8, "120000", 2), (8, "200000", 2), (8, "10000", 1), (2, "900000", 2)],
)
def test_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, affinity: int, cpu_max: str, expected: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(affinity)), raising=False)
    root = machine(tmp_path, "0::/\n", {"cpu.max": f"{cpu_max} 100000\n"})
    assert threads.cores(root) == expected


def test_cores_of_this_machine() -> None:
    assert 1 <= threads.cores() <= threads.affinity() <= (os.cpu_count() or 1)


@pytest.mark.parametrize(
    "cores, processes, parts, expected",
    [
        (8, 1, 1, 8),
        (8, 2, 1, 4),
        (8, 3, 1, 2),
        (2, 4, 1, 1),
        (1, 1, 1, 1),
        # A rank with two of a machine's four devices.
        (8, 4, 2, 4),
        (2, 4, 2, 2),
    ],
)
def test_shares(cores: int, processes: int, parts: int, expected: int) -> None:
    assert threads.share(cores, processes, parts) == expected


def test_verlites_number_is_divided_and_the_users_is_not() -> None:
    """A rollout worker has 6 threads; its engine has 2 processes, each of which starts others."""
    threads.use(6)
    assert (threads.users(), threads.mine()) == (0, 6)
    with threads.dividing(2):
        assert (threads.users(), threads.mine()) == (0, 3)
        with threads.dividing(4):
            assert threads.mine() == 1
        assert threads.mine() == 3
    assert (threads.users(), threads.mine()) == (0, 6)

    threads.use(6, by_user=True)
    assert (threads.users(), threads.divided(2)) == (6, {})
    with threads.dividing(2):
        assert (threads.users(), threads.mine()) == (6, 6)


def test_the_cores_are_divided_if_nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "cores", lambda: 8)
    assert threads.divided(4) == {threads.COUNT: "2", threads.OURS: "2"}
    with threads.dividing(4):
        assert threads.mine() == 2
    assert threads.COUNT not in os.environ and threads.OURS not in os.environ


@pytest.mark.slow
def test_a_process_that_has_loaded_torch_gets_the_number_too() -> None:
    """In a process of its own: an engine of vLLM replaces torch.set_num_threads."""
    code = (
        "import torch\nfrom verlite import threads\nthreads.use(3)\nprint(torch.get_num_threads())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "3"


@pytest.mark.parametrize(
    "cores, environment, expected",
    [
        (8, {}, None),  # torch's default
        (3, {}, "3"),  # a quota, which torch does not know
        (8, {threads.TORCHRUN: "4"}, "2"),
        (3, {threads.TORCHRUN: "4"}, "1"),
        (3, {threads.COUNT: "7", threads.TORCHRUN: "4"}, "7"),
    ],
)
def test_what_a_process_begins_with(
    monkeypatch: pytest.MonkeyPatch, cores: int, environment: dict[str, str], expected: str | None
) -> None:
    """On a machine with 8 cores, of which `cores` may be used."""
    monkeypatch.setattr(threads, "affinity", lambda: 8)
    monkeypatch.setattr(threads, "cores", lambda: cores)
    os.environ |= environment
    threads.settle()
    assert os.environ.get(threads.COUNT) == expected
    assert threads.users() == (7 if expected == "7" else 0)
    assert os.environ["GOMP_SPINCOUNT"] == threads.SPINS


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="torch's libgomp is Linux's")
def test_the_library_reads_the_settings() -> None:
    """It reads the variables once, when torch is imported."""
    # vLLM sets LD_PRELOAD, with which the library is loaded before Python starts.
    environment = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}
    printed = subprocess.run(
        [sys.executable, "-c", "import verlite.algorithms.losses"],
        env=environment | {LIBRARY: "VERBOSE"} | threads.divided(64),
        capture_output=True,
        text=True,
        check=True,
    ).stderr
    assert f"GOMP_SPINCOUNT = '{threads.SPINS}'" in printed
    assert f"OMP_NUM_THREADS = '{threads.share(threads.cores(), 64)}'" in printed


@pytest.mark.parametrize("name", threads.CHOICES)
def test_the_users_choice_stays(name: str) -> None:
    os.environ[name] = "own"
    threads.settle()
    assert {k: os.environ[k] for k in threads.CHOICES if k in os.environ} == {name: "own"}
    assert threads.waiting() == f"{name}=own"


def test_what_doctor_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "affinity", lambda: 16)
    monkeypatch.setattr(threads, "quota", lambda root=Path("/"): 7.5)
    cores, each = threads.described(workers=4)
    assert cores == "8 (affinity 16, CPU quota 7.5)"
    assert each == (
        "8 in the driver and in an only worker, 2 in each of 4 workers, 1 in each reward process"
    )
    os.environ[threads.COUNT] = "5"
    assert threads.described(workers=4)[1] == "5 in each process (OMP_NUM_THREADS is set)"
