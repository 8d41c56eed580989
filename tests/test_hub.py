"""Files of the hub, with a server on this machine in its place."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub.constants
import pytest

from verlite import hub
from verlite.data.dataset import DataError, RowFiles
from verlite.hub import HubError, local_file
from verlite.spec.roles import DataSpec

ROW = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "1+1="}],
    "reward_model": {"style": "rule", "ground_truth": "2"},
}
FILES = {"sums.jsonl": json.dumps(ROW) + "\n", "main/test.csv": "a,b\n1,2\n", "README.md": "#"}
COMMITS = {"main": "a" * 40, "v2": "b" * 40, "refs/convert/parquet": "c" * 40}
SUMS = "hf://datasets/me/sums/sums.jsonl"


class Hub(BaseHTTPRequestHandler):
    """The part of the hub's interface that a download needs, for the data set me/sums."""

    asked: list[str] = []

    def do_HEAD(self) -> None:
        self.asked.append(f"{self.command} {self.path}")
        if self.path == "/":
            return self.answer(200)
        if self.path.startswith("/api/datasets/me/sums/tree/"):
            entries = [{"type": "file", "path": f, "size": 1, "oid": "0"} for f in FILES]
            return self.answer(200, json.dumps(entries))
        if not self.path.startswith("/datasets/me/sums/resolve/"):
            return self.answer(404, **{"X-Error-Code": "RepoNotFound"})
        revision, _, file = self.path.removeprefix("/datasets/me/sums/resolve/").partition("/")
        commit = COMMITS.get(revision.replace("%2F", "/"), revision)
        if file not in FILES:
            return self.answer(404, **{"X-Error-Code": "EntryNotFound"})
        self.answer(200, FILES[file], **{"X-Repo-Commit": commit, "ETag": f'"{commit}{file}"'})

    do_GET = do_HEAD

    def answer(self, status: int, text: str = "", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(text.encode())

    def log_message(self, *words: object) -> None:
        pass


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of the server, and an empty cache."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(hub, "endpoint", lambda: address)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    Hub.asked.clear()
    forget()
    yield address
    server.shutdown()
    thread.join()
    server.server_close()
    forget()


def forget() -> None:
    """As in a new process."""
    hub.unreachable.cache_clear()
    hub._download.cache_clear()


def test_a_file_is_downloaded_once(place: str) -> None:
    files = RowFiles(SUMS, DataSpec(), "train")
    assert files.in_files == 1 and files.name(0, 0) == f"{SUMS} row 0"
    assert local_file(SUMS).read_text() == FILES["sums.jsonl"]
    assert sum(line.startswith("GET /datasets") for line in Hub.asked) == 1
    assert local_file("~/a.csv") == Path("~/a.csv").expanduser()


@pytest.mark.parametrize(
    ("revision", "commit"),
    [("", "a"), ("@v2", "b"), ("@~parquet", "c"), ("@refs%2Fconvert%2Fparquet", "c")],
)
def test_revisions(place: str, revision: str, commit: str) -> None:
    path = local_file(f"hf://datasets/me/sums{revision}/main/test.csv")
    assert path.read_text() == FILES["main/test.csv"]
    assert path.parts[-3] == commit * 40


def test_the_cache_is_enough_without_a_network(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = local_file(SUMS)
    forget()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert local_file(SUMS) == path
    with pytest.raises(DataError) as caught:
        RowFiles("hf://datasets/me/other/a.jsonl", DataSpec(), "train")
    assert str(caught.value) == (
        f"hf://datasets/me/other/a.jsonl is not in the cache, and the hub at {place} cannot be "
        "reached (HF_HUB_OFFLINE is set). Download it where the hub can be reached (hf download "
        "me/other a.jsonl --repo-type dataset --local-dir FOLDER) and name the file"
    )


def test_what_is_not_there(place: str) -> None:
    with pytest.raises(
        HubError, match="me/sums has no sum.jsonl. Its data files: sums.jsonl, main"
    ):
        local_file("hf://datasets/me/sums/sum.jsonl")
    with pytest.raises(HubError, match=f"the hub at {place} has no data set me/none, or shows it"):
        local_file("hf://datasets/me/none/sums.jsonl")
    for name in (
        "hf://datasets/me/sums",
        "hf://me/sums/sums.jsonl",
        "hf://datasets/me/../sums.jsonl",
        "hf://datasets//sums/sums.jsonl",
    ):
        with pytest.raises(HubError, match="Write hf://datasets/OWNER/NAME/FILE, or hf"):
            local_file(name)


def test_whether_the_hub_answers(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert hub.unreachable() is None
    forget()
    monkeypatch.setattr(hub, "endpoint", lambda: "http://127.0.0.1:9")
    assert "refused" in str(hub.unreachable())
    forget()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert hub.unreachable() == "HF_HUB_OFFLINE is set"


@pytest.mark.parametrize(
    ("error", "expected"),
    [(OSError("a.\nb"), "a"), (TimeoutError(), "TimeoutError"), (OSError("\n"), "OSError")],
)
def test_an_error_without_text_has_its_type(
    place: str, monkeypatch: pytest.MonkeyPatch, error: Exception, expected: str
) -> None:
    def fail(*args: object, **options: object) -> None:
        raise error

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    with pytest.raises(HubError) as caught:
        local_file(SUMS)
    assert str(caught.value) == f"cannot be downloaded from {place}: {expected}"
    assert hub.reason(error) == expected


@pytest.mark.parametrize(
    ("text", "is_name"),
    [
        ("gpt2", True),
        ("Qwen/Qwen2.5-0.5B", True),
        ("/tmp/model", False),
        ("./model", False),
        ("../model", False),
        ("a/b/c", False),
        ("models/", False),
        ("mödel", False),
        ("a model", False),
    ],
)
def test_what_can_be_a_name(text: str, is_name: bool) -> None:
    assert (hub.NAME.fullmatch(text) is not None) == is_name


def test_neighbors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert hub.neighbors("models/nope") == hub.neighbors("nope") == ""
    for name in ("qwen", "llama"):
        Path("models", name).mkdir(parents=True)
    assert hub.neighbors("models/nope") == "The folder models here has llama, qwen. "
