"""A run of asynchronous training is killed at random moments, again and again, and resumed.

    python -m tests.chaos.async_kills FOLDER [KILLS] [SEED]

In the end every prompt that was drawn must have been trained once, within its age.
"""

import random
import re
import sys
import time
from collections import Counter
from pathlib import Path

from tests.models import tiny_model
from tests.trainer.runs import APART, Launch, digits, samples_of

PER_STEP, SAMPLES, MAX_AGE = 8, 4, 2


def main(folder: Path, kills: int, seed: int) -> None:
    folder.mkdir(parents=True)
    model = tiny_model(folder / "model", "qwen2")
    steps = 3 * kills
    options = [
        *digits(folder, model),
        *[one for one in APART if not one.startswith("trainer.save_freq")],
        "data.max_response_length=96",
        "actor_rollout_ref.rollout.ignore_eos=true",
        "actor_rollout_ref.rollout.max_num_seqs=16",
        "actor_rollout_ref.actor.optim.lr=1e-4",
        "algorithm.rollout_correction.bypass_mode=true",
        "trainer.mode=async",
        f"async_training.max_age={MAX_AGE}",
        "async_training.depth=2",
        f"trainer.total_training_steps={steps}",
        "trainer.save_freq=1",
        "trainer.max_actor_ckpt_to_keep=2",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
        "trainer.export_hf=false",
    ]
    draw, began, went_on = random.Random(seed), time.monotonic(), []
    for number in range(kills + 1):
        run = Launch(folder / "run", options, folder / f"{number}.log", forked=True)
        first = len(run.metrics())
        if number < kills:
            while len(run.metrics()) <= first and run.process.poll() is None:
                time.sleep(0.02)
            time.sleep(draw.uniform(0.0, 2.5))
            if run.process.poll() is not None:
                raise SystemExit(f"it ended by itself:\n{run.text()}")
            run.process.kill()
            run.process.wait()
            run.assert_nothing_left()
        elif run.wait(300) != 0:
            raise SystemExit(run.text())
        found = re.search(r"(\d+) running prompts of the checkpoint go on", run.text())
        went_on.append(int(found[1]) if found else 0)
        print(
            f"{number}: step {run.metrics()[-1]['step']}, {went_on[-1]} prompts went on, "
            f"{time.monotonic() - began:.0f} s",
            flush=True,
        )
    check(samples_of(run), steps)
    print(
        f"{kills} kills, {steps} steps: each prompt was trained once; "
        f"{sum(went_on)} running prompts went on"
    )


def check(found: dict[int, list[dict]], steps: int) -> None:
    if sorted(found) != list(range(1, steps + 1)):
        raise SystemExit(f"steps are missing: {sorted(found)}")
    counts = Counter(record["uid"] for records in found.values() for record in records)
    expected = {f"{step}-{place}" for step in range(1, steps + 1) for place in range(PER_STEP)}
    if set(counts) != expected or set(counts.values()) != {SAMPLES}:
        wrong = {uid: n for uid, n in counts.items() if n != SAMPLES}
        raise SystemExit(f"not trained once: {wrong}, missing {sorted(expected - set(counts))}")
    ages, mixed = Counter(), 0
    for step, records in found.items():
        for record in records:
            oldest = record.get("oldest_version", record["weight_version"])
            mixed += oldest != record["weight_version"]
            ages[step - oldest] += 1
            if record["error"] or not step - MAX_AGE <= oldest <= record["weight_version"] <= step:
                raise SystemExit(f"step {step}: {record}")
    print(f"ages {dict(sorted(ages.items()))}, {mixed} samples of several versions")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
