"""Settings that must not change between a checkpoint and a run that resumes from it."""

from typing import Any

from verlite.config.plan import max_turns
from verlite.config.schema import Config

AGENT_LENGTHS = ("max_start_length", "max_prompt_length", "max_response_length", "max_obs_length")
LORA = ("lora_rank", "lora_alpha", "target_modules", "exclude_modules", "lora_adapter_path")


def critical_settings(config: Config) -> dict[str, Any]:
    """Return the settings whose change would change the results of a resumed run."""
    model = config.actor_rollout_ref.model
    actor = config.actor_rollout_ref.actor
    rollout = config.actor_rollout_ref.rollout
    return {
        "actor_rollout_ref.model.path": model.path,
        **{f"actor_rollout_ref.model.{name}": getattr(model, name) for name in LORA},
        "actor_rollout_ref.rollout.n": rollout.n,
        "actor_rollout_ref.rollout.seed": rollout.seed,
        "actor_rollout_ref.actor.ppo_mini_batch_size": actor.ppo_mini_batch_size,
        "actor_rollout_ref.actor.ppo_epochs": actor.ppo_epochs,
        "algorithm.adv_estimator": config.algorithm.adv_estimator,
        "data.train_files": config.data.train_files,
        "data.train_batch_size": config.data.train_batch_size,
        "data.seed": config.data.seed,
        "data.shuffle": config.data.shuffle,
        "max_turns": max_turns(config),
        **(
            {"env.name": config.env.name, "env.kwargs": config.env.kwargs}
            if max_turns(config)
            else {}
        ),
        **(
            {f"data.{name}": getattr(config.data, name) for name in AGENT_LENGTHS}
            if max_turns(config)
            else {}
        ),
        **(
            {"retriever.topk": config.retriever.topk}
            if max_turns(config) and config.env.name == "search"
            else {}
        ),
    }
