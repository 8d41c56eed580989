"""The training loop, on one page. Every stage is a function of the run and the batch; the comment names the fields it adds.

PPO, GRPO and their relatives are this loop with another `algorithm.adv_estimator`: which stages have work to do follows
from the configuration (no critic unless the estimator uses values, no reference unless a KL term uses it).
"""

from verlite.protocol.data import DataProto
from verlite.trainer.finish import finish_step, start_with_validation
from verlite.trainer.run import Run
from verlite.trainer.stages import (
    advantages,
    balance,
    correct,
    gather,
    generate,
    next_prompts,
    old_log_probs,
    reference_log_probs,
    score,
    update_actor,
    update_critic,
    values,
)
from verlite.trainer.sync import sync_weights


def train(run: Run) -> None:
    """Train until the last step, or until a stop is requested; the run's last checkpoint is then up to date."""
    sync_weights(run)  # the rollout engine holds the trainer's weights, proven by fingerprint
    if not start_with_validation(run):
        return
    for _ in run.steps():
        batch = DataProto()
        while (
            len(batch) < run.plan.batch_size
        ):  # once, unless algorithm.filter_groups asks for more
            more = next_prompts(run)  # uid prompt_ids sampling data_source ground_truth extra_info
            more = generate(
                run, more
            )  # response_ids response_mask rollout_log_probs raw_scores valid
            more = score(run, more)  # scores (reward_baselines)
            batch = gather(run, batch, more)
        batch = balance(run, batch)  # mini_batch_index
        batch = old_log_probs(run, batch)  # old_log_probs entropy_sums gap_sums
        batch = correct(run, batch)  # rollout_is_weights rejected_tokens
        batch = reference_log_probs(run, batch)  # ref_log_prob
        batch = values(run, batch)  # values
        batch = advantages(
            run, batch
        )  # rewards advantages returns, trained_tokens of what is left in the loss
        update_critic(run, batch)
        update_actor(run, batch)
        sync_weights(run)
        finish_step(run, batch)  # metrics, samples, validation, checkpoint
