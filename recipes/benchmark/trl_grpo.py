"""TRL's GRPO on a workload, for comparison. Runs in TRL's own environment; prints one line of JSON.

python recipes/benchmark/trl_grpo.py WORKLOAD STEPS

On a CPU TRL generates with transformers: its vLLM mode cannot load weights into vLLM's repacked
parameters there.
"""

import time

STARTED = time.perf_counter()

import json  # noqa: E402
import sys  # noqa: E402
import tempfile  # noqa: E402

from datasets import Dataset  # noqa: E402
from transformers import TrainerCallback  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402
from workload import WORKLOADS, model_of, prompts, reward  # noqa: E402

MICRO_BATCH = {"w25": 32, "wtiny": 32, "w25p": 8}
"""Samples a pass, about 4,000 tokens."""


class Timer(TrainerCallback):
    """Records the seconds of each step and from the start of the process to the end of the
    first."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.first = 0.0

    def on_step_begin(self, *args, **kwargs) -> None:
        self.began = time.perf_counter()

    def on_step_end(self, *args, **kwargs) -> None:
        self.seconds.append(time.perf_counter() - self.began)
        self.first = self.first or time.perf_counter() - STARTED


def main(name: str, steps: int) -> None:
    workload, timer = WORKLOADS[name], Timer()
    texts = prompts(workload.prompts * steps, workload.prompt_tokens)
    trainer = GRPOTrainer(
        model=str(model_of(name)),
        reward_funcs=lambda completions, **_: [reward(text) for text in completions],
        train_dataset=Dataset.from_list([{"prompt": text} for text in texts]),
        args=GRPOConfig(
            output_dir=tempfile.mkdtemp(),
            max_steps=steps,
            use_cpu=True,
            bf16=False,
            report_to=[],
            save_strategy="no",
            per_device_train_batch_size=MICRO_BATCH[name],
            gradient_accumulation_steps=workload.rows // MICRO_BATCH[name],
            generation_batch_size=workload.rows,
            num_generations=workload.samples,
            max_completion_length=workload.new_tokens,
            learning_rate=1e-5,
            beta=0.0,
            gradient_checkpointing=False,
            logging_steps=1,
            disable_tqdm=True,
        ),
        callbacks=[timer],
    )
    trainer.train()
    tokens = [log["num_tokens"] for log in trainer.state.log_history if "num_tokens" in log]
    print(
        json.dumps(
            {"steps": timer.seconds, "first_step": timer.first, "tokens": tokens[-1] / len(tokens)}
        )
    )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
