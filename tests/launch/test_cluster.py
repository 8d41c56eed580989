"""`verlite cluster`: head file, token, waiting, retries and devices, without starting Ray."""

import dataclasses
import json
import os
import signal
import socket
import sys
import time
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from verlite.cli import app
from verlite.cli import cluster as command
from verlite.control import limits
from verlite.controller import head as joined
from verlite.controller import ray_node
from verlite.controller.node import this_process
from verlite.controller.ray_internals import ClusterView, NodeView
from verlite.launch import ClusterError, addresses, devices, head, ray_daemons, start
from verlite.launch.head import Head, HeadSource
from verlite.launch.ray_start import main as run_ray_start

HEAD = Head("10.0.0.1:6379", "c1", True, "gpu-0", 1000.0)


@pytest.fixture(autouse=True)
def no_environment(monkeypatch, tmp_path):
    """Keep the cluster and the variables of the machine out of the tests."""
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_ADDRESS", "RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("VERLITE_CLUSTER_DIR", str(tmp_path / "node"))
    monkeypatch.setenv("HOME", str(tmp_path))


def node(rank, gpus=8, address=None, is_head=False):
    labels = {} if rank is None else {ray_node.RANK_LABEL: str(rank)}
    resources = {"CPU": 64.0, "GPU": float(gpus)} if gpus else {"CPU": 8.0}
    return NodeView(address or f"10.0.0.{rank}", is_head, labels, resources)


def record(**changes):
    me = this_process()
    values = {
        "rank": 0,
        "address": "10.0.0.1:6379",
        "node_address": "10.0.0.1",
        "cluster_id": "c1",
        "authenticated": True,
        "shared": None,
        "mark": "m",
        "boot": ray_node.boot_id(),
        "started": 1.0,
        "daemons": [("raylet", me.pid, me.started)],
        "session_dir": "",
    }
    return ray_node.RayNode(**(values | changes))


def answering(monkeypatch, view, token="secret"):
    """Pretend that a Ray with this view and token answers at every address."""

    def ask(address):
        if os.environ.get("RAY_AUTH_TOKEN") != token:
            raise PermissionError("InvalidAuthToken")
        return view

    monkeypatch.setattr(head, "answers", lambda address: True)
    monkeypatch.setattr(start, "answers", lambda address: True)
    monkeypatch.setattr(head.ray_internals, "view", ask)


# The head file and the token.


@pytest.mark.parametrize("address", ["10.0.0.1:6379", "[fd00::1]:7000"])
def test_head_file_returns_what_was_written(tmp_path, address):
    written = dataclasses.replace(HEAD, address=address)
    head.write_head(tmp_path, written)
    assert head.read_head(tmp_path, 1) == written
    first = (tmp_path / head.HEAD_FILE).read_text().splitlines()[0]
    assert first == addresses.split(address)[0]  # other tools read the address alone
    assert os.listdir(tmp_path) == [head.HEAD_FILE]


def test_head_file_of_another_tool_has_only_an_address(tmp_path):
    (tmp_path / head.HEAD_FILE).write_text("10.0.0.7\n")
    assert head.read_head(tmp_path, 29500) == Head("10.0.0.7:29500")


def test_head_file_with_other_text_is_refused(tmp_path):
    (tmp_path / head.HEAD_FILE).write_text("gpu-0 is the head\n")
    with pytest.raises(ClusterError, match="does not begin with an IP address: 'gpu-0 is"):
        head.read_head(tmp_path, 6379)


def test_token_can_be_read_by_this_user_only(tmp_path):
    token = head.create_token(tmp_path / "new")
    path = tmp_path / "new" / head.TOKEN_FILE
    assert path.stat().st_mode & 0o777 == 0o600 and len(token) == 64
    assert head.read_token(path.parent) == token != head.create_token(path.parent)
    path.chmod(0o640)
    with pytest.raises(ClusterError, match="has mode 640: other users can read the token"):
        head.read_token(path.parent)


def test_stop_leaves_the_head_file_of_a_newer_cluster(tmp_path):
    head.create_token(tmp_path)
    head.write_head(tmp_path, HEAD)
    head.remove_head(tmp_path, "an older cluster")
    assert len(os.listdir(tmp_path)) == 2
    head.remove_head(tmp_path, "c1")
    assert os.listdir(tmp_path) == []


# Finding the head.


def test_missing_head_file_is_waited_for_and_named(tmp_path):
    with pytest.raises(ConnectionError, match=r"ray_head_ip.txt does not exist. Rank 0 writes it"):
        head.find_head(HeadSource(tmp_path))


def test_wait_for_the_head_is_bounded_and_says_why(tmp_path):
    said = []
    begin = time.monotonic()
    with pytest.raises(ClusterError, match="gave up after 0 s .--wait.: .* does not exist"):
        start._wait_for_head(HeadSource(tmp_path, wait_s=0.3), said.append)
    assert time.monotonic() - begin < 3
    assert len(said) == 1 and "giving up in" in said[0]


def test_stale_head_file_is_not_followed(tmp_path, monkeypatch):
    head.write_head(tmp_path, HEAD)
    token = head.create_token(tmp_path)
    monkeypatch.setattr(head, "answers", lambda address: False)
    with pytest.raises(ConnectionError, match="10.0.0.1:6379, started .* where no Ray answers"):
        head.find_head(HeadSource(tmp_path))
    answering(monkeypatch, ClusterView("c2", "", [node(0, is_head=True)]), token)
    with pytest.raises(ConnectionError, match="another cluster answers there now"):
        head.find_head(HeadSource(tmp_path))
    answering(monkeypatch, ClusterView("c1", "", [node(0, is_head=True)]), "another token")
    with pytest.raises(ConnectionError, match="refuses the token of that folder"):
        head.find_head(HeadSource(tmp_path))
    answering(monkeypatch, ClusterView("c1", "", []), token)
    with pytest.raises(ConnectionError, match="own node has not joined"):
        head.find_head(HeadSource(tmp_path))
    view = ClusterView("c1", "", [node(0, is_head=True)])
    answering(monkeypatch, view, token)
    assert head.find_head(HeadSource(tmp_path)) == ("10.0.0.1:6379", token, view)


def test_the_dashboards_port_as_the_heads_is_named(monkeypatch):
    monkeypatch.setattr(head, "answers", lambda address: False)
    with pytest.raises(ConnectionError, match="8265 is the dashboard's port.*head's: 6379"):
        head.find_head(HeadSource(None, "10.0.0.1:8265"))


def test_a_taken_dashboard_port_is_named():
    assert start.dashboard_line("127.0.0.1:8265", 8265) == "dashboard: http://127.0.0.1:8265"
    assert start.dashboard_line("127.0.0.1:8266", 8265) == (
        "dashboard: http://127.0.0.1:8266 (another program has port 8265)"
    )


def test_wrong_token_with_a_given_head_is_not_waited_for(monkeypatch):
    answering(monkeypatch, ClusterView("c1", "", [node(0, is_head=True)]))
    source = HeadSource(None, "10.0.0.1:6379")
    with pytest.raises(ClusterError, match="needs a token that all nodes know"):
        head.find_head(source)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "wrong")
    with pytest.raises(ClusterError, match="refuses this token"):
        head.find_head(source)
    assert os.environ["RAY_AUTH_TOKEN"] == "wrong"
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
    assert head.find_head(source)[1] == "secret"
    without = dataclasses.replace(source, authenticate=False)
    with pytest.raises(ClusterError, match="refuses a process without a token"):
        head.find_head(without)


def test_token_exported_for_an_earlier_cluster_is_not_used(monkeypatch, tmp_path):
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(ray_node.token_path()))
    assert head.given_token(HeadSource(tmp_path)) is None
    other = tmp_path / "mine"
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(other))
    with pytest.raises(ClusterError, match="mine cannot be read: No such file"):
        head.given_token(HeadSource(tmp_path))
    other.write_text("secret\n")
    assert head.given_token(HeadSource(tmp_path)) == "secret"


def test_second_head_is_refused_while_the_first_runs(tmp_path, monkeypatch):
    head.write_head(tmp_path, HEAD)
    token = head.create_token(tmp_path)
    source = HeadSource(tmp_path)
    answering(monkeypatch, ClusterView("c1", "", []), token)
    with pytest.raises(ClusterError, match="names a head that runs: 10.0.0.1:6379 on gpu-0"):
        start._refuse_second_head(source, tmp_path, "10.0.0.2:6379", print)
    said = []
    answering(monkeypatch, ClusterView("c2", "", []), token)
    start._refuse_second_head(source, tmp_path, "10.0.0.2:6379", said.append)
    assert "no longer runs" in said[0] and os.listdir(tmp_path) == []


def test_second_head_at_the_same_address_is_refused(tmp_path, monkeypatch):
    """The record of this machine may be gone, and another token may be exported here."""
    head.write_head(tmp_path, HEAD)
    token = head.create_token(tmp_path)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "another")
    answering(monkeypatch, ClusterView("c1", "", []), token)
    with pytest.raises(ClusterError, match="names a head that runs"):
        start._refuse_second_head(HeadSource(tmp_path), tmp_path, HEAD.address, print)
    assert head.read_token(tmp_path) == token


def test_empty_head_file_is_not_there_yet(tmp_path):
    (tmp_path / head.HEAD_FILE).write_text("")
    assert head.read_head(tmp_path, 6379) is None
    (tmp_path / head.HEAD_FILE).write_text("10.0.0.1\nport: x\n")
    with pytest.raises(ClusterError, match="port or started is not a number"):
        head.read_head(tmp_path, 6379)


def test_head_file_without_a_token_is_not_replaced_while_a_ray_answers(tmp_path, monkeypatch):
    head.write_head(tmp_path, HEAD)
    answering(monkeypatch, ClusterView("c1", "", []))
    with pytest.raises(ClusterError, match="the token is missing, so it cannot be asked"):
        start._refuse_second_head(HeadSource(tmp_path), tmp_path, "10.0.0.2:6379", print)


def test_rank_that_another_node_has_is_refused(tmp_path, monkeypatch):
    nodes = [node(0, is_head=True), node(1, address="10.0.0.5")]
    answering(monkeypatch, ClusterView("c1", "", nodes))
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
    options = start.Options(1, HeadSource(None, "127.0.0.1:6379"))
    with pytest.raises(ClusterError, match="rank 1 is taken by 10.0.0.5"):
        start.start(options, print)


# The record of this machine's node.


def test_record_is_private_and_ends_with_the_machine(tmp_path):
    ray_node.save(record())
    assert ray_node.load() == record()
    assert ray_node.folder().stat().st_mode & 0o777 == 0o700
    ray_node.save(record(boot="before the reboot"))
    assert ray_node.load() is None
    ray_node.record_path().write_text(json.dumps({"rank": 0}))
    assert ray_node.load() is None


def test_record_folder_that_others_can_write_is_refused():
    ray_node.folder().mkdir(mode=0o755)
    with pytest.raises(ray_node.NodeStateError, match="nobody else can read or write"):
        ray_node.save(record())


def test_second_start_on_a_machine_is_refused_until_the_first_has_died():
    ray_node.save(record())
    with pytest.raises(ClusterError, match="already runs on this machine"):
        start._end_remains(print)
    said = []
    ray_node.save(record(daemons=[("raylet", 1 << 30, 5), ("dashboard", os.getpid(), 1)]))
    start._end_remains(said.append)
    assert "has died (raylet)" in said[0] and ray_node.load() is None


def test_run_joins_the_cluster_that_was_started_here(monkeypatch):
    ray_node.save(record())
    monkeypatch.setattr(joined, "_what_is_missing", lambda target, source: None)
    assert joined.find(None) == "10.0.0.1:6379"
    assert joined.find("local") is None
    monkeypatch.setattr(joined, "_what_is_missing", lambda target, source: "gone")
    with pytest.raises(joined.NoCluster, match="no longer answers. Run `verlite cluster stop`"):
        joined.find(None)
    ray_node.remove()
    monkeypatch.setattr(joined.ray_internals, "running_cluster", lambda: None)
    assert joined.find(None) is None


# `ray start`.


@pytest.fixture
def ray_start(monkeypatch):
    """Replace `ray start`. Return (its results to come, the calls)."""
    results, calls, killed = [], [], []

    def run(command, environment, log):
        calls.append((command, environment))
        return results.pop(0)

    monkeypatch.setattr(ray_daemons, "_run", run)
    monkeypatch.setattr(ray_daemons, "kill", lambda mark, *folders: killed.append(mark))
    monkeypatch.setattr(ray_daemons, "RETRY_PAUSE_S", 0)
    return results, calls, killed


def test_failed_ray_start_is_cleaned_up_and_tried_again(ray_start):
    results, calls, killed = ray_start
    said = []
    results += [(1, "noise\nNo node info found for head node in GCS\n"), (0, "")]
    ray_daemons.start(["--address=x"], {"RAY_AUTH_TOKEN": None}, "mark", said.append)
    assert len(calls) == 2 and killed == ["mark"]
    assert said == [
        "ray start failed with exit code 1 (try 1 of 5): No node info found for head node in GCS"
    ]
    command, environment = calls[0]
    assert environment[ray_node.MARK] == "mark/ray" and "RAY_AUTH_TOKEN" not in environment
    assert environment["RAY_raylet_start_wait_time_s"] == "5"
    assert all(any(name in option for option in command) for name in ray_daemons.AGENT_PORTS)
    assert calls[1][0] != command, "a port may have been the reason"


@pytest.mark.parametrize(
    "output, tries", [("late", 5), ("RuntimeError: Version mismatch: 2.60 and 2.59", 1)]
)
def test_ray_start_that_fails_for_good_shows_its_output(ray_start, output, tries):
    results, calls, killed = ray_start
    results += [(1, output)] * 5
    with pytest.raises(
        ClusterError, match=f"failed {tries} time.s., at last with exit code 1"
    ) as e:
        ray_daemons.start([], {}, "mark", lambda text: None)
    assert len(calls) == len(killed) == tries and str(e.value).endswith(f"  {output}")


def test_agents_get_free_ports_that_the_user_did_not_choose(monkeypatch):
    """A raylet that has to ask a slow agent for its port ends after 15 s."""
    monkeypatch.setattr(ray_daemons, "PORTS", range(30000, 30005))
    with socket.create_server(("127.0.0.1", 30001)):
        given = ["--metrics-export-port", "9000", "--port=30003"]
        chosen = dict(option.split("=") for option in ray_daemons.agent_ports(given))
    assert sorted(chosen) == sorted(set(ray_daemons.AGENT_PORTS) - {"--metrics-export-port"})
    assert sorted(chosen.values()) == ["30000", "30002", "30004"]


def test_the_raylet_knows_the_port_of_the_agent(monkeypatch):
    from ray._private import ray_constants, services

    started, options = [], []
    monkeypatch.setattr(services, "start_ray_process", lambda *args, **kwargs: started.append(args))
    scripts = SimpleNamespace(cli=lambda args, prog_name: options.append(args))
    monkeypatch.setitem(sys.modules, "ray.scripts.scripts", scripts)
    run_ray_start(["--head", "--dashboard-agent-listen-port=30007"])
    for process in (ray_constants.PROCESS_TYPE_RAYLET, ray_constants.PROCESS_TYPE_GCS_SERVER):
        services.start_ray_process(["program"], process, fate_share=False)
    assert [command[1:] for command, _ in started] == [["--dashboard_agent_listen_port=30007"], []]
    assert options == [["start", "--head", "--dashboard-agent-listen-port=30007"]]


def test_labels_of_the_user_are_kept():
    label = f"{ray_node.RANK_LABEL}=1"
    assert ray_daemons.with_label(["--labels=a=b", "--memory=1"], label) == [
        "--memory=1",
        "--labels",
        f"{label},a=b",
    ]
    assert ray_daemons.with_label(["--labels", "a=b"], label)[-1] == f"{label},a=b"


# Addresses.


@pytest.mark.parametrize(
    "text, result",
    [
        ("10.0.0.1", "10.0.0.1:6379"),
        ("10.0.0.1:7000", "10.0.0.1:7000"),
        ("fd00::1", "[fd00::1]:6379"),
        ("[fd00::1]:7000", "[fd00::1]:7000"),
        ("[fd00::1]", "[fd00::1]:6379"),
    ],
)
def test_head_option_takes_host_and_port(text, result):
    assert addresses.resolve_head(text, 6379) == result


@pytest.mark.parametrize(
    "text, message",
    [("10.0.0.1:http", "'http' is not a port"), ("no-such-host.invalid", "has no address here")],
)
def test_head_option_that_names_no_address_is_refused(text, message):
    with pytest.raises(ClusterError, match=message):
        addresses.resolve_head(text, 6379)


def test_own_address_is_the_one_that_leads_to_the_head():
    assert addresses.own_address(None, "127.0.0.1") == "127.0.0.1"
    loopback = next(name for name, address in addresses.interfaces() if address == "127.0.0.1")
    assert addresses.own_address(loopback, None) == "127.0.0.1"
    with pytest.raises(ClusterError, match="no such address or interface. It has .*127.0.0.1"):
        addresses.own_address("203.0.113.9", None)


def test_port_in_use_is_refused_with_the_remedy():
    from verlite.controller.node import free_listener

    with free_listener("127.0.0.1") as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ClusterError, match="cannot be used: Address already in use.*RAY_PORT"):
            addresses.check_port("127.0.0.1", port)
    addresses.check_port("127.0.0.1", port)


# Devices.


def test_devices_are_gpus_or_cpu_slots_in_order_of_rank():
    found = devices.count([node(10), node(2), node(None, gpus=0, address="10.0.0.9")])
    assert found.kind == "GPU" and found.total == 16
    assert [rank for rank, _, _ in found.nodes] == [-1, 2, 10]
    assert devices.count([node(0, gpus=0), node(1, gpus=0)]).total == 16


def test_check_reports_each_change_once_and_succeeds_with_more(monkeypatch):
    views = [[node(0)], [node(0)], [node(0), node(1)], [node(0), node(1), node(2)]]
    monkeypatch.setattr(devices, "view", lambda source: views.pop(0))
    monkeypatch.setattr(devices, "POLL_S", 0)
    said = []
    assert devices.check(17, HeadSource(None), None, said.append)
    assert said == [
        "Available GPUs: 8 (Required: 17)",
        "Available GPUs: 16 (Required: 17)",
        "Available GPUs: 24 (Required: 17)",
        "Success: Required GPU count (17) is now available.",
    ]


def test_check_names_the_ranks_that_are_missing(monkeypatch):
    monkeypatch.setattr(devices, "view", lambda source: [node(0), node(2)])
    said = []
    assert not devices.check(32, HeadSource(None, wait_s=0), None, said.append)
    assert "\n".join(said) == (
        "Available GPUs: 16 (Required: 32)\n"
        "Gave up after 0 s (--wait).\n"
        "  rank 0  10.0.0.0  8 GPUs\n"
        "  rank 2  10.0.0.2  8 GPUs\n"
        "  not joined: rank 1, 3 of 4 nodes (for 32 with 8 per node)"
    )
    assert "rank 1 of 3 nodes" in devices.report(devices.count([node(0), node(2)]), 32, 3)


def test_check_counts_nodes_without_a_rank():
    unranked = node(2)._replace(labels={})
    text = devices.report(devices.count([node(0), unranked]), 32, 4)
    assert "2 of 4 nodes have joined" in text and "not joined: rank" not in text


def test_check_asks_the_cluster_that_was_named_not_the_one_of_this_machine(monkeypatch, tmp_path):
    """The record of this machine has a token for its own cluster only."""
    clusters = {"10.0.0.1:6379": "own", "10.0.0.2:6379": "other"}
    views = {"own": [node(0, is_head=True)], "other": [node(5, is_head=True)]}

    def ask(address):
        if os.environ.get("RAY_AUTH_TOKEN") != clusters[address]:
            raise PermissionError("InvalidAuthToken")
        return ClusterView(clusters[address], "", views[clusters[address]])

    for module in (head, devices):
        monkeypatch.setattr(module, "answers", lambda address: True)
    monkeypatch.setattr(head.ray_internals, "view", ask)
    folders = {}
    for address, token in clusters.items():
        folders[token] = tmp_path / token
        folders[token].mkdir()
        (folders[token] / head.TOKEN_FILE).write_text(token)
        (folders[token] / head.TOKEN_FILE).chmod(0o600)
        head.write_head(folders[token], Head(address, token, True, "gpu", 1.0))
    ray_node.save(record(cluster_id="own", shared=str(folders["own"])))
    ray_node.token_path().write_text("own")

    nothing = HeadSource(tmp_path / "default", named=False)
    for source in (nothing, HeadSource(folders["own"]), HeadSource(None, "10.0.0.1:6379")):
        assert devices.view(source) == views["own"]
    assert devices.view(HeadSource(folders["other"])) == views["other"]
    monkeypatch.setenv("RAY_AUTH_TOKEN", "other")
    assert devices.view(HeadSource(None, "10.0.0.2:6379")) == views["other"]


# --block.


def test_blocking_head_reports_nodes_that_join_and_leave_then_stops(monkeypatch):
    """It asks its own cluster, whatever the options of the start named."""
    views = [[node(0)], [node(0), node(1)], [node(0)]]
    said = []
    monkeypatch.setattr(limits, "VIEW_EVERY_S", 0)
    monkeypatch.setattr(start.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(start.guardian, "start", lambda mark: said.append(mark))
    monkeypatch.setattr(start.guardian, "dismiss", lambda guard: said.append("dismissed"))
    monkeypatch.setattr(start, "stop", lambda say: said.append("stopped"))

    def view(source):
        assert not source.named
        if not views:
            raise KeyboardInterrupt
        return views.pop(0)

    monkeypatch.setattr(start, "view", view)
    with pytest.raises(KeyboardInterrupt):
        start.watch(record(), HeadSource(None), said.append)
    assert said == [
        f"{ray_node.MARK}=m",
        "rank 1 (10.0.0.1, 8 devices) has joined: 16 devices in all",
        "rank 1 (10.0.0.1, 8 devices) is lost: 8 devices remain",
        "stopped",
        "dismissed",
    ]


def test_blocking_node_ends_when_the_head_is_lost(monkeypatch):
    """One answer among the failures shows that the head is slow, not lost."""
    answers = [False] * 5 + [True] + [False] * 20
    ended = []
    monkeypatch.setattr(limits, "VIEW_EVERY_S", 0)
    monkeypatch.setattr(start.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(start.guardian, "start", lambda mark: None)
    monkeypatch.setattr(start.guardian, "dismiss", lambda guard: None)
    monkeypatch.setattr(start, "stop", ended.append)
    monkeypatch.setattr(start, "answers", lambda address: answers.pop(0))
    with pytest.raises(ClusterError, match="the head at 10.0.0.1:6379 does not answer: ending Ray"):
        start.watch(record(rank=1), HeadSource(None), print)
    assert len(answers) == 14 and ended == [print]


# The command.


def run(*arguments):
    return CliRunner().invoke(app, ["cluster", *arguments])


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["start"], "RANK is not set. Give each node a number"),
        (["start", "--rank", "-1"], "greater than or equal to 0"),
        (["start", "--rank", "1", "--", "--port=1"], "use --port before the --"),
        (["start", "--rank", "1", "--head", "a:b"], "'b' is not a port"),
        (["check", "0"], "greater than or equal to 1"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    result = run(*arguments)
    assert result.exit_code == 2 and message in result.output


def test_nohup_survives_a_hangup_and_other_signals_stop_once():
    """nohup starts a command with SIGHUP ignored."""
    before = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        command._catch_signals()
        os.kill(os.getpid(), signal.SIGHUP)
        with pytest.raises(command.Stopped) as stopped:
            os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)  # the cleanup is not interrupted
        assert stopped.value.number == signal.SIGTERM

        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        command._catch_signals()
        with pytest.raises(command.Stopped) as stopped:
            os.kill(os.getpid(), signal.SIGHUP)
        assert stopped.value.number == signal.SIGHUP
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_stop_with_nothing_started_says_so():
    result = run("stop")
    assert result.exit_code == 0 and "Nothing to stop" in result.output
