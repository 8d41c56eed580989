"""The reference service against the same engine in this process: tokens per second, and the largest
difference of a log-prob.

python recipes/benchmark/reference.py [--model PATH] [--sequences 128] [--tokens 256] [--rounds 5]

Local and service take turns, so that other work on the machine slows both. The service runs in
float32 on one CPU process with as many threads as this process.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from report import keep
from workload import VOCABULARY, model_in

from verlite.engine import reference_client
from verlite.engine.fsdp import TrainEngine
from verlite.engine.micro import MicroBatching
from verlite.engine.process_group import single_process_group
from verlite.engine.scoring import rows_of
from verlite.spec.roles import FSDPSpec, ModelSpec, ServiceSpec

MICRO_TOKENS = 4096


@contextmanager
def serving(model: str) -> Iterator[ServiceSpec]:
    """Run the service; yield the configuration of its client."""
    command = [sys.executable, "-m", "verlite", "serve", "reference", "--model_path", model]
    command += ["--port=0", "--device=cpu", f"--max_tokens_per_gpu={MICRO_TOKENS}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        yield ServiceSpec((process.stdout.readline().split()[-1],))
        process.terminate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--model")
    parser.add_argument("--sequences", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, single_process_group():
        shape = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8}
        shape |= {"vocab_size": VOCABULARY, "num_attention_heads": 8, "num_key_value_heads": 4}
        model = options.model or str(model_in(Path(folder), **shape))
        engine = TrainEngine(ModelSpec(path=model), FSDPSpec(), device="cpu")
        vocab_size = engine.model.model.config.get_text_config().vocab_size
        rng = np.random.default_rng(0)
        sequences = list(
            rng.integers(0, vocab_size, (options.sequences, options.tokens), dtype=np.int32)
        )
        scored = [options.tokens * 3 // 4] * options.sequences
        count = options.sequences * options.tokens
        seconds: dict[str, list[float]] = {"local": [], "service": []}
        with serving(model) as config:
            name = reference_client.check(config)[0].model
            for _ in range(options.rounds + 1):
                began = time.perf_counter()
                rows = rows_of(sequences, scored)
                local = engine.forward(rows, MicroBatching(max_tokens=MICRO_TOKENS))["log_probs"]
                seconds["local"].append(time.perf_counter() - began)
                began = time.perf_counter()
                served = reference_client.log_probs(config, sequences, scored, 1.0, name)
                seconds["service"].append(time.perf_counter() - began)
        largest = float(np.abs(np.stack(served) - local.numpy()).max())
        speed = {key: count / statistics.median(values[1:]) for key, values in seconds.items()}
        ratios = [a / b for a, b in zip(seconds["local"][1:], seconds["service"][1:], strict=True)]
        found = {
            "sequences": options.sequences,
            "tokens": options.tokens,
            "rounds": options.rounds,
            "tokens_per_s": speed,
            "service_vs_local": statistics.median(ratios),
            "ratios": [min(ratios), max(ratios)],
            "largest_difference": largest,
        }
        print(json.dumps(found, indent=1))
        if options.model is None:
            keep("reference", found)


if __name__ == "__main__":
    main()
