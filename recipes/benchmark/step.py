"""Whole GRPO steps: verlite by its command line, with Ray and vLLM, and TRL, alternating on the
same machine.

python recipes/benchmark/step.py [w25] [wtiny] [--rounds 3] [--steps 4] [--engine vllm] [key=value
...]
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from machine import gemm_flops
from report import keep
from workload import BUILD, WORKLOADS, data_of, model_of

HERE = Path(__file__).resolve().parent
TRL = HERE / "build" / "trl" / "bin" / "python"
MICRO_BATCH_TOKENS = 2048
ENGINES = {"w25": "vllm", "w25p": "vllm", "wtiny": "hf"}
MILESTONES = (".lock", "config.yaml", "logs/actor_0.log", "logs/rollout_0.log", "metrics.jsonl")
"""Files that a run writes after import and configuration, after data and rewards are ready, when
each worker's process exists, and after the first step."""


def overrides(name: str, steps: int, folder: Path, engine: str) -> list[str]:
    """Return the arguments of `python -m verlite.main_ppo` that train a workload."""
    workload = WORKLOADS[name]
    return [
        "algorithm.adv_estimator=grpo",
        f"data.train_files={data_of(name, steps)}",
        f"data.train_batch_size={workload.prompts}",
        f"data.max_prompt_length={max(16, workload.prompt_tokens)}",
        f"data.max_response_length={workload.new_tokens}",
        f"actor_rollout_ref.model.path={model_of(name)}",
        "actor_rollout_ref.model.enable_gradient_checkpointing=false",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={workload.prompts}",
        "actor_rollout_ref.actor.use_dynamic_bsz=true",
        f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={MICRO_BATCH_TOKENS}",
        "actor_rollout_ref.actor.optim.lr=1e-5",
        f"actor_rollout_ref.rollout.name={engine}",
        f"actor_rollout_ref.rollout.n={workload.samples}",
        # All samples run at once, as in TRL.
        f"actor_rollout_ref.rollout.max_num_seqs={workload.prompts * workload.samples}",
        f"custom_reward_function.path={HERE / 'workload.py'}",
        "reward.check_ground_truth=false",
        "trainer.n_gpus_per_node=1",
        "trainer.save_freq=-1",
        "trainer.test_freq=-1",
        "trainer.val_before_train=false",
        f"trainer.total_training_steps={steps}",
        "trainer.logger=[]",
        f"trainer.default_local_dir={folder}",
    ]


def verlite(name: str, steps: int, engine: str, extra: Sequence[str] = ()) -> dict:
    """Train in a child process. Return seconds per step, seconds to the first step, tokens, and
    seconds per stage."""
    with tempfile.TemporaryDirectory(dir=BUILD) as scratch:
        folder = Path(scratch) / "run"
        began = time.perf_counter()
        command = [
            sys.executable,
            "-m",
            "verlite.main_ppo",
            *overrides(name, steps, folder, engine),
            *extra,
        ]
        seen, log = {}, Path(scratch) / "log"
        with (
            log.open("w") as output,
            subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT) as process,
        ):
            try:
                while process.poll() is None:
                    for name in MILESTONES:
                        file = folder / name
                        if name not in seen and file.exists() and file.stat().st_size:
                            seen[name] = time.perf_counter() - began
                    time.sleep(0.05)
            finally:
                process.terminate()
        if process.returncode or len(seen) < len(MILESTONES):
            raise SystemExit(f"{' '.join(command)}\n{log.read_text()}")
        lines = [
            json.loads(line)
            for line in (folder / MILESTONES[-1]).read_text(encoding="utf-8").splitlines()
        ]
    stages = {
        key.removeprefix("timing_s/")
        for line in lines
        for key in line
        if key.startswith("timing_s/")
    }
    return {
        "steps": [line["timing_s/step"] for line in lines],
        "first_step": seen[MILESTONES[-1]],
        "milestones": seen,
        "tokens": statistics.mean(line["perf/total_num_tokens"] for line in lines),
        "stages": {
            stage: statistics.median(
                line.get(f"timing_s/{stage}", 0.0) for line in lines[1:] or lines
            )
            for stage in sorted(stages)
        },
    }


def trl(name: str, steps: int) -> dict:
    """Train with TRL."""
    if not TRL.exists():
        raise SystemExit(
            f"{TRL} does not exist. `make benchmark` installs TRL in a separate environment"
        )
    done = subprocess.run(
        [TRL, HERE / "trl_grpo.py", name, str(steps)], capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def compare(name: str, rounds: int, steps: int, engine: str, extra: Sequence[str] = ()) -> dict:
    """Run both alternately; medians over all steps except the first of each run."""
    model_of(name)
    ours, theirs, peaks = [], [], []
    for number in range(rounds):
        peaks.append(gemm_flops())
        theirs.append(trl(name, steps + 1))
        ours.append(verlite(name, steps + 1, engine, extra))
        print(
            f"{name} round {number}: TRL {median([theirs[-1]]):.2f} s, "
            f"verlite {median([ours[-1]]):.2f} s per step",
            flush=True,
        )
    parameters = parameters_of(name)
    tokens = statistics.median(run["tokens"] for run in ours)
    floor = (6 + 2) * parameters * tokens / statistics.median(peaks)
    return {
        "engine": engine,
        "parameters": parameters,
        "rounds": rounds,
        "steps_per_round": steps,
        "tokens_per_step": tokens,
        "trl_tokens_per_step": statistics.median(r["tokens"] for r in theirs),
        "seconds": median(ours),
        "trl_seconds": median(theirs),
        "floor_seconds": floor,
        "vs_trl": median(ours) / median(theirs),
        "vs_floor": median(ours) / floor,
        "vs_trl_per_token": per_token(ours) / per_token(theirs),
        "seconds_to_first_step": statistics.median(run["first_step"] for run in ours),
        "trl_seconds_to_first_step": statistics.median(run["first_step"] for run in theirs),
        "stages": {
            stage: statistics.median(run["stages"][stage] for run in ours)
            for stage in ours[0]["stages"]
        },
        "all": {"verlite": [run["steps"] for run in ours], "trl": [run["steps"] for run in theirs]},
    }


def median(runs: list[dict]) -> float:
    return statistics.median(second for run in runs for second in run["steps"][1:])


def per_token(runs: list[dict]) -> float:
    """Return seconds per token, because sampled lengths differ between runs."""
    return median(runs) / statistics.median(run["tokens"] for run in runs)


def parameters_of(name: str) -> int:
    from safetensors import safe_open

    with safe_open(model_of(name) / "model.safetensors", framework="pt") as file:
        return sum(math.prod(file.get_slice(key).get_shape()) for key in file.keys())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rest", nargs="*", help="workloads, and overrides for verlite")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--engine")
    args = parser.parse_args()
    names = [word for word in args.rest if word in WORKLOADS] or list(WORKLOADS)
    extra = [word for word in args.rest if word not in WORKLOADS]
    if wrong := [word for word in extra if "=" not in word]:
        parser.error(
            f"{wrong[0]} is neither a workload ({', '.join(WORKLOADS)}) nor an override key=value"
        )
    for name in names:
        found = compare(name, args.rounds, args.steps, args.engine or ENGINES[name], extra)
        keep(f"step_{name}", found)
        print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
