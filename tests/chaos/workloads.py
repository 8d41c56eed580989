"""The runs that the faults disturb: tiny ones, whose numbers are equal in equal runs."""

from dataclasses import dataclass
from pathlib import Path

from recipes.search import make
from tests.chaos.hosts import Hosts
from tests.models import tiny_model
from tests.trainer.runs import write_reward, write_sums
from tests.trainer.test_agent_runs import TIME_DEPENDENT, Facts, teach

SAVE_EVERY_STEP = [
    "trainer.save_freq=1",
    "trainer.max_actor_ckpt_to_keep=3",
    "trainer.max_failed_saves=1000",
    "trainer.rollouts_per_step=-1",
    "trainer.n_gpus_per_node=1",
]

LONG_VALIDATION_ROWS = 2048


class Service:
    """A retriever that can be stopped and started again on its port."""

    def __init__(self) -> None:
        self.server = Facts().__enter__()

    def start(self) -> None:
        self.server = Facts(self.server.port).__enter__()

    def stop(self) -> None:
        self.server.__exit__()


@dataclass(frozen=True)
class Workload:
    """A run's command line."""

    name: str
    steps: int
    first_step: int
    """Step of the first line in metrics.jsonl: 0 if the run validates before it trains."""
    options: list[str]
    ignored: tuple[str, ...] = ()
    """Beginnings of further metrics that differ between equal runs."""
    retriever: Service | None = None
    """The running retriever of an agent run."""
    hosts: Hosts | None = None
    """The running cluster of a run on two nodes."""
    faults: tuple[str, ...] = ()
    """The only faults that it gets. (): all that fit."""


def sums(folder: Path, steps: int, hidden_size: int = 32) -> Workload:
    """Return a PPO run with all roles and a reward function in its own processes."""
    folder.mkdir(parents=True)
    # Any text gets some of this score, so that advantages are not all 0.
    reward = write_reward(folder / "reward.py", "return sum(c.isdigit() for c in solution_str) / 4")
    options = [
        f"data.train_files={write_sums(folder / 'train.parquet', 64)}",
        f"data.val_files={write_sums(folder / 'val.parquet', 8, 64)}",
        f"custom_reward_function.path={reward}",
        f"actor_rollout_ref.model.path={tiny_model(folder / 'model', hidden_size=hidden_size)}",
        "data.train_batch_size=8",
        "data.max_prompt_length=8",
        "data.max_response_length=8",
        "algorithm.adv_estimator=gae",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "actor_rollout_ref.rollout.name=hf",
        "actor_rollout_ref.rollout.n=2",
        "trainer.test_freq=4",
        f"trainer.total_training_steps={steps}",
        *SAVE_EVERY_STEP,
    ]
    return Workload("sums", steps, 0, options)


def search(folder: Path, steps: int) -> Workload:
    """Return an agent run with a retriever, which is started here and ends with this process."""
    folder.mkdir(parents=True)
    make.make_data(folder, seed=0)
    make.make_model(folder / "model", seed=0)
    teach(folder)
    retriever = Service()
    options = [
        "--config-name=search_demo",
        f"data.train_files={folder}/train.parquet",
        f"data.val_files={folder}/test.parquet",
        f"actor_rollout_ref.model.path={folder}/model",
        f"retriever.url={retriever.server.url}",
        "retriever.deadline_s=2",
        "retriever.cache_size=0",
        "retriever.outage_wait_s=600",
        "data.train_batch_size=4",
        "data.val_max_samples=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.rollout.n=4",
        # One failed search makes the run wait for the retriever and sample the step again.
        "actor_rollout_ref.rollout.max_error_rate=0",
        "trainer.val_before_train=false",
        "trainer.test_freq=4",
        f"trainer.total_training_steps={steps}",
        *SAVE_EVERY_STEP,
    ]
    return Workload("search", steps, 1, options, TIME_DEPENDENT, retriever)


def long_validation(folder: Path, steps: int) -> Workload:
    """Return a GRPO run that saves every third step and validates every second for seconds."""
    base = sums(folder, steps)
    left_out = ("trainer.save_freq", "trainer.test_freq", "data.val_files", "algorithm.", "critic.")
    options = [option for option in base.options if not option.startswith(left_out)]
    options += [
        f"data.val_files={write_sums(folder / 'long_val.parquet', LONG_VALIDATION_ROWS, 64)}",
        "algorithm.adv_estimator=grpo",
        "trainer.save_freq=3",
        "trainer.test_freq=2",
        "trainer.val_before_train=false",
    ]
    return Workload("long_validation", steps, 1, options)


def vllm(folder: Path, steps: int) -> Workload:
    """Return the PPO run on two devices, with two vLLM engines, which need heads of 32 or more."""
    base = sums(folder, steps, hidden_size=128)
    left_out = ("actor_rollout_ref.rollout.name", "trainer.n_gpus_per_node")
    options = [option for option in base.options if not option.startswith(left_out)]
    options += ["actor_rollout_ref.rollout.name=vllm", "trainer.n_gpus_per_node=2"]
    # The last digits of the engine's log-probs depend on which requests share a batch.
    ignored = ("training/log_prob_gap", "training/rollout_")
    return Workload("vllm", steps, 0, options, ignored)


def hosts(folder: Path, steps: int) -> Workload:
    """Return a GRPO run on a cluster of two nodes, which is started here and ends with this
    process. All that a fault may find there is in `faults`."""
    base = sums(folder, steps)
    left_out = ("algorithm.", "actor_rollout_ref.actor.use_kl_loss")
    options = [option for option in base.options if not option.startswith(left_out)]
    options += [
        "algorithm.adv_estimator=grpo",
        "trainer.nnodes=2",
        # Shorter than a node may stay away, so that `verlite supervise` has to wait, too.
        "trainer.resource_wait_s=15",
    ]
    faults = ("driver SIGKILL", "driver SIGTERM", *SECOND_NODE)
    return Workload("hosts", steps, 0, options, hosts=Hosts(folder), faults=faults)


SECOND_NODE = ("second node: actor SIGKILL", "second node: rollout SIGKILL", "second node lost")
"""Faults on the second node of `hosts`."""
WORKLOADS = {"sums": sums, "search": search, "vllm": vllm, "hosts": hosts}
USUAL = ("sums", "search")
"""What a soak disturbs in turn if no workload is named."""
