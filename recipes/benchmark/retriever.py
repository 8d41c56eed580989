"""`verlite serve retriever`: seconds to build and load a BM25 index, queries per second, and
recall.

python recipes/benchmark/retriever.py recall --corpus corpus.jsonl --questions FILE.json [--k1 0.9
--b 0.4] python recipes/benchmark/retriever.py speed --corpus corpus.jsonl --questions FILE.json
python recipes/benchmark/retriever.py speed --made 1000000

Questions are HotpotQA's: [{"question", "supporting_facts": [[title, sentence], ...]}, ...]. --made
generates that many passages of about 60 words and queries of 8 words, from 200,000 words with Zipf
frequencies, and stores the results for docs/benchmarks.md.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
import psutil
from report import keep

from verlite.services.index import BM25, open_index

TOPK = 3
CLIENTS = 8
SECONDS = 20.0


def recall(corpus_path: Path, questions: list[dict], k1: float, b: float) -> None:
    """Print the recall: the fraction of supporting titles among the first TOPK passages."""
    index = BM25(k1, b)
    corpus = open_index(corpus_path, index, None, False, lambda items, **shown: items)
    shares = []
    for question, found in zip(
        questions, index.search([question["question"] for question in questions], TOPK), strict=True
    ):
        wanted = {title for title, _ in question["supporting_facts"]}
        titles = {corpus[row]["contents"].split("\n")[0].strip('"') for row, _ in found}
        shares.append(len(wanted & titles) / len(wanted))
    kept = np.array(shares)
    print(f"{len(corpus)} passages, {len(questions)} questions, k1={k1} b={b}")
    print(
        f"recall@{TOPK} of titles {kept.mean():.3f}; "
        f"all titles {np.mean(kept == 1):.2f}, any {np.mean(kept > 0):.2f} of questions"
    )


def speed(corpus_path: Path, queries: list[str]) -> dict[str, float]:
    """Print seconds to build and load, memory, and queries per second for one client's batches and
    several clients' single queries."""
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        index = Path(folder) / "index"
        for what in ("built", "loaded"):
            start = time.perf_counter()
            with served(corpus_path, index) as (process, line, address):
                ready = time.perf_counter() - start
                size = sum(file.stat().st_size for file in index.iterdir()) / 2**20
                found[f"{what}_seconds"] = ready
                print(f"{what} in {ready:.1f} s ({cpu(process):.1f} s of CPU), {line}")
                print(f"peak memory {peak(process):.0f} MiB, index {size:.0f} MiB", flush=True)
                if what == "built":
                    continue
                for batch, clients in ((64, 1), (1, CLIENTS)):
                    rate = measure(address, queries, batch, clients)
                    found["queries_per_s" if clients == 1 else "single_queries_per_s"] = rate
                    print(
                        f"{rate:.0f} queries/s, {clients} clients with {batch} queries per request",
                        flush=True,
                    )
                found["peak_mib"] = peak(process)
                print(f"peak memory {found['peak_mib']:.0f} MiB", flush=True)
    return found


@contextmanager
def served(corpus_path: Path, index: Path) -> Iterator[tuple[subprocess.Popen, str, str]]:
    line = [
        sys.executable,
        "-m",
        "verlite.cli",
        "serve",
        "retriever",
        "--port",
        "0",
        "--corpus",
        str(corpus_path),
        "--index",
        str(index),
    ]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        ready = process.stdout.readline().strip()
        yield process, ready, ready.split(" at ")[1]
    finally:
        process.terminate()
        process.wait()


def measure(address: str, queries: list[str], batch: int, clients: int) -> float:
    """Return queries per second over SECONDS."""
    end = time.perf_counter() + SECONDS

    def ask(client_number: int) -> int:
        chosen, asked = np.random.default_rng(client_number), 0
        with httpx.Client(timeout=300) as client:
            while time.perf_counter() < end:
                body = {
                    "queries": [queries[i] for i in chosen.integers(len(queries), size=batch)],
                    "topk": TOPK,
                    "return_scores": True,
                }
                assert (
                    len(client.post(address, json=body).raise_for_status().json()["result"])
                    == batch
                )
                asked += batch
        return asked

    start = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        return sum(pool.map(ask, range(clients))) / (time.perf_counter() - start)


def cpu(process: subprocess.Popen) -> float:
    """Return the process's CPU seconds, on which other processes have little influence."""
    times = psutil.Process(process.pid).cpu_times()
    return times.user + times.system


def peak(process: subprocess.Popen) -> float:
    """Return the peak resident memory in MiB, memory-mapped files included."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def make(rows: int, path: Path) -> list[str]:
    """Write generated passages and return queries."""
    chosen = np.random.default_rng(0)
    words = np.array([f"w{place:x}" for place in range(200_000)])
    share = 1 / np.arange(10, 10 + len(words))
    steps = np.cumsum(share / share.sum())

    def text(length: int) -> str:
        return " ".join(
            words[np.searchsorted(steps, chosen.random(length)).clip(max=len(words) - 1)]
        )

    with open(path, "w") as file:
        for row in range(rows):
            file.write(
                json.dumps(
                    {
                        "id": str(row),
                        "contents": f'"{text(2)}"\n{text(int(chosen.integers(40, 80)))}',
                    }
                )
                + "\n"
            )
    return [text(8) for _ in range(1000)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["recall", "speed"])
    parser.add_argument("--corpus", type=Path)
    parser.add_argument("--questions", type=Path)
    parser.add_argument("--made", type=int)
    parser.add_argument("--k1", type=float, default=0.9)
    parser.add_argument("--b", type=float, default=0.4)
    arguments = parser.parse_args()
    if arguments.made:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "corpus.jsonl"
            keep(
                "retriever", {"passages": arguments.made, **speed(path, make(arguments.made, path))}
            )
        return
    questions = json.loads(arguments.questions.read_text())
    if arguments.what == "recall":
        recall(arguments.corpus, questions, arguments.k1, arguments.b)
    else:
        speed(arguments.corpus, [question["question"] for question in questions])


if __name__ == "__main__":
    main()
