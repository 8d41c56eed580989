"""The stages of one training step. Each takes the run and the batch, and returns the batch with its own fields added.

A stage is timed (`timing_s/<name>`), shown as the current phase, and leaves its metrics in `run.metrics`.
"""

import functools
import json
from collections import defaultdict
from collections.abc import Callable

import torch
from tensordict import TensorDict

from verlite.algorithms.advantages import (
    AdvantageInputs,
    compute_advantages,
    place_scores,
)
from verlite.algorithms.gap import gap_metrics, gap_totals
from verlite.algorithms.kl import apply_kl_penalty
from verlite.algorithms.masked import masked_mean
from verlite.algorithms.rollout_correction import correct_rollout
from verlite.algorithms.shaping import overlong_penalty, rows_with_signal, shape_scores
from verlite.config import catalog
from verlite.config.schema import Config
from verlite.controller.columns import fetch
from verlite.data.dataset import PromptRow
from verlite.protocol import fields
from verlite.protocol.data import DataProto, object_array
from verlite.protocol.ragged import TOKENS, padded, ragged
from verlite.rollout.types import Sampling, Status
from verlite.trainer import batch as batches
from verlite.trainer.agent import sample_numbers, wait_for_tools
from verlite.trainer.errors import (
    LogProbGap,
    RewardFailures,
    RolloutFailures,
    StepAborted,
    TooFewGroups,
)
from verlite.trainer.evaluation import validation_metrics
from verlite.trainer.metrics import spread, token_metrics
from verlite.trainer.run import Run

_MOST_DRAWS = 4  # of the same samples, each after an outage
_UPDATE = (
    "rollout_log_probs",
    "old_log_probs",
    "ref_log_prob",
    "advantages",
    "rollout_is_weights",
    "rejected_tokens",
    "selected_tokens",
)
"""What a policy loss may look at beside the tokens."""
_SHOWN = ("prompt_ids", "text", "transcript")
"""What a person wants to see of a sample, and the driver does not have."""


def stage(name: str) -> Callable:
    """Time a stage and show it as the current phase."""

    def wrap(function: Callable) -> Callable:
        @functools.wraps(function)
        def timed(run: Run, *args):
            with run.stopwatch(name), run.display.phase(name):
                return function(run, *args)

        return timed

    return wrap


def next_prompts(run: Run) -> DataProto:
    """G prompts, each `rollout.n` times with one uid, and its sampling parameters; for remax also once greedily."""
    rollout, longest = run.config.actor_rollout_ref.rollout, run.config.data.max_response_length
    rows = [run.train_data.row(i) for i in run.sampler.next_batch()]
    uids = [f"{run.step}-{run.drawn + i}" for i in range(len(rows))]
    wanted = [(row, uid) for row, uid in zip(rows, uids, strict=True) for _ in range(rollout.n)]
    samplings = [
        Sampling(
            rollout.temperature,
            rollout.top_p,
            rollout.top_k,
            longest,
            seed=seed,
            ignore_eos=rollout.ignore_eos,
        )
        for seed in batches.seeds(rollout.seed, run.step, run.drawn, len(wanted))
    ]
    run.drawn += len(rows)
    if run.plan.needs_greedy_baseline:
        wanted += list(zip(rows, uids, strict=True))
        samplings += [Sampling(0.0, 1.0, -1, longest)] * len(rows)
    return batches.requests([row for row, _ in wanted], [uid for _, uid in wanted], samplings)


@stage("gen")
def generate(run: Run, requests: DataProto) -> DataProto:
    """Sample responses and score each when it is finished: response_ids response_mask rollout_log_probs raw_scores valid status.

    Raises:
        RolloutFailures: more than `rollout.max_error_rate` of the samples failed; the message has the first failure.
    """
    batch = answered(
        run, requests, sleep_after=not run.plan.filters_groups
    )  # the next generation of the step needs their weights
    failed, limit = (
        torch.from_numpy(batch.non_tensor_batch["status"] == Status.ERROR),
        run.config.actor_rollout_ref.rollout.max_error_rate,
    )
    if (rate := failed.double().mean().item()) > limit:
        if run.stop.requested:  # while it waited for tools
            raise StepAborted
        raise RolloutFailures(
            f"{rate:.1%} of this step's samples could not be generated, more than actor_rollout_ref.rollout.max_error_rate={limit:g} "
            f"allows. The first failure: {batch.non_tensor_batch['error'][failed.nonzero()[0, 0]]}"
        )
    return batch


def answered(run: Run, requests: DataProto, sleep_after: bool) -> DataProto:
    """The batch of these requests; sampled anew when the tools failed too many of them and then came back.

    Not for ever: tools that answer a check may fail the samples all the same.
    """
    waits = run.env_factory is not None and run.config.retriever.outage_wait_s > 0
    asked = requests.select(
        [], ["prompt_ids", "sampling", "data_source", "ground_truth", "extra_info"]
    )
    known = requests.pop(non_tensor_batch_keys=["prompt_ids"])[1]
    for left in reversed(range(_MOST_DRAWS)):
        batch = known.union(run.rollout.generate(asked, sleep_after=sleep_after and not waits))
        if not (waits and left and wait_for_tools(run, batch)):
            break
    if waits and sleep_after:
        run.rollout.sleep()
    return batch


@stage("reward")
def score(run: Run, batch: DataProto) -> DataProto:
    """What the rewards are worth in training: scores. Greedy rows become reward_baselines and leave the batch.

    Raises:
        RewardFailures: more than `reward.max_error_rate` of the scores failed; the message has the first traceback.
    """
    run.stopwatch.seconds["reward"] += batch.batch["reward_seconds"].max().item()
    limit, (rate, first_error) = run.config.reward.max_error_rate, reward_failures(batch)
    if rate > limit:
        raise RewardFailures(
            f"{rate:.1%} of this step's rewards failed, more than reward.max_error_rate={limit:g} allows. The first failure:\n"
            f"{first_error.rstrip()}\n"
            "Correct the reward function, or raise reward.max_error_rate: samples without a reward are then left out of the update"
        )
    batch = shaped(run, batch).with_meta(reward_error_rate=rate)
    greedy = torch.tensor([s.temperature == 0 for s in batch.non_tensor_batch["sampling"]])
    if not greedy.any():
        return batch
    return with_baselines(batch.select_idxs(~greedy), batch.select_idxs(greedy))


def reward_failures(batch: DataProto) -> tuple[float, str]:
    """Which share of the completed samples has no reward, and where the first one's failed."""
    completed = torch.from_numpy(batch.non_tensor_batch["status"] != Status.ERROR)
    failed = (completed & ~batch.batch["valid"]).nonzero().flatten().tolist()
    first = batch.non_tensor_batch["reward_traceback"][failed[0]] if failed else ""
    return len(failed) / max(1, int(completed.sum())), first


def shaped(run: Run, batch: DataProto) -> DataProto:
    """The scores as training takes them: normalised, clipped, and less the penalty for length; 0 without a trained token."""
    reward, longest, t = run.config.reward, run.config.data.max_response_length, batch.batch
    after_baseline = (
        run.config.algorithm.adv_estimator == "rloo_token_kl"
    )  # which clips what is left of the score then
    scores = shape_scores(
        t["raw_scores"], reward.mean, reward.std, None if after_baseline else reward.clip_range
    )
    if reward.overlong_buffer.enable:
        penalty = overlong_penalty(
            t["response_length"],
            longest,
            run.plan.overlong_buffer,
            reward.overlong_buffer.penalty_factor,
        )
        scores, batch = scores + penalty, batch.with_batch(overlong_penalty=penalty)
    return batch.with_batch(scores=scores.masked_fill(t["trained_tokens"] == 0, 0))


def gather(run: Run, batch: DataProto, more: DataProto) -> DataProto:
    """The step's samples so far, and those of another generation.

    With `algorithm.filter_groups` (DAPO's dynamic sampling, arXiv:2503.14476, section 3.2) only prompts whose samples differ are
    kept, until there are `data.train_batch_size` of them; further ones are dropped, and the engines sleep.

    Raises:
        TooFewGroups: `filter_groups.max_num_gen_batches` generations, or those of one pass over the data, did not fill the step.
    """
    if not run.plan.filters_groups:
        return more
    settings, plan = run.config.algorithm.filter_groups, run.plan
    name = settings.metric or "score"
    metric = _filter_metric(more, name)
    kept = more.select_idxs(
        rows_with_signal(metric, more.non_tensor_batch["uid"], more.batch["valid"])
    )
    draws = run.drawn // plan.gen_prompts
    averages = {
        "filter_groups/kept_ratio": len(kept) / len(more),
        "filter_groups/score/mean": masked_mean(
            more.batch["raw_scores"], more.batch["valid"]
        ).item(),
        "reward/error_rate": more.meta_info["reward_error_rate"],
    }
    for key, value in averages.items():  # over all generations of the step
        before = run.metrics.get(key, 0.0)
        run.metrics[key] = before + (value - before) / draws
    run.metrics["train/num_gen_batches"] = float(draws)
    parts = [part for part in (batch, kept) if len(part)]
    joined = DataProto.concat([part.select(meta_info_keys=[]) for part in parts]) if parts else kept
    joined = joined[: plan.batch_size].with_meta(reward_error_rate=run.metrics["reward/error_rate"])
    limit = settings.max_num_gen_batches or -(-len(run.train_data) // plan.gen_prompts)
    if len(joined) < plan.batch_size and draws >= limit:
        raise TooFewGroups(
            f"after {draws} generations of {plan.gen_prompts} prompts, only {len(joined) // plan.samples_per_prompt} of "
            f"data.train_batch_size={plan.prompts} have samples whose {name} differs (mean score "
            f"{run.metrics['filter_groups/score/mean']:.3g}): the other prompts are too easy or too hard for this policy. Use other "
            "prompts, raise actor_rollout_ref.rollout.n or temperature, allow more with algorithm.filter_groups.max_num_gen_batches, "
            "or train on all with algorithm.filter_groups.enable=false"
        )
    if len(joined) == plan.batch_size:
        _sleep(run)
    return joined


@stage("gen")
def _sleep(run: Run) -> None:
    run.rollout.sleep()


def _filter_metric(batch: DataProto, name: str) -> torch.Tensor:
    """[B] what must differ between the samples of a prompt."""
    if name in ("score", "seq_reward"):
        return batch.batch["raw_scores" if name == "score" else "scores"]
    parts, valid = batch.non_tensor_batch["reward_parts"], batch.batch["valid"].tolist()
    if name == "acc" and not any(
        name in part for part in parts
    ):  # scorers that only tell right from wrong
        return batch.batch["raw_scores"]
    for part, ok in zip(parts, valid, strict=True):
        if ok and not isinstance(part.get(name), (int, float)):
            numbers = sorted(key for key, value in part.items() if isinstance(value, (int, float)))
            raise TooFewGroups(
                f"algorithm.filter_groups.metric={name}: the reward function returned no such number for each sample. "
                f"Numbers that it returned: {', '.join(['score', *numbers])}"
            )
    return torch.tensor(
        [part[name] if ok else 0.0 for part, ok in zip(parts, valid, strict=True)],
        dtype=torch.float64,
    )


def with_baselines(batch: DataProto, greedy: DataProto) -> DataProto:
    """Sampled rows with the score of their prompt's greedy row, reward_baselines. Where that row failed, its prompt has no vote."""
    scores, valid = greedy.batch["scores"].tolist(), greedy.batch["valid"].tolist()
    baselines = {
        uid: score
        for uid, score, ok in zip(greedy.non_tensor_batch["uid"], scores, valid, strict=True)
        if ok
    }
    uids, errors = batch.non_tensor_batch["uid"], list(batch.non_tensor_batch["error"])
    compared = torch.tensor([uid in baselines for uid in uids])
    for row in (batch.batch["valid"] & ~compared).nonzero().flatten().tolist():
        errors[row] = "the greedy answer to this prompt failed, so there is nothing to compare with"
    valid = batch.batch["valid"] & compared
    return batch.with_batch(
        valid=valid,
        trained_tokens=batch.batch["trained_tokens"]
        * valid,  # without a vote it is trained on nowhere: no loss, mean or count sees it
        reward_baselines=torch.tensor(
            [baselines.get(uid, 0.0) for uid in uids], dtype=torch.float32
        ),
    ).with_non_tensor(error=object_array(errors))


def balance(run: Run, batch: DataProto) -> DataProto:
    """Decide which rows update together: mini_batch_index, and critic_mini_batch_index where there is a critic."""
    uids, seed = (
        batch.non_tensor_batch["uid"],
        [run.config.actor_rollout_ref.actor.data_loader_seed, run.step],
    )
    batch = batch.with_batch(mini_batch_index=batches.update_numbers(uids, run.plan.actor, seed))
    if run.plan.critic is None:
        return batch
    return batch.with_batch(
        critic_mini_batch_index=batches.update_numbers(uids, run.plan.critic, [*seed, 1])
    )


def to_ranks(run: Run, batch: DataProto, role: str, *columns: str) -> DataProto:
    """The batch as one role's ranks take it: rows spread by cost within each update, and the number of updates in an epoch.

    With the numbers of each row, its tokens, and those of the named ragged columns that there are. Ranks that run their rows together
    are one to spread over; which of them brings a row does not matter.
    """
    numbers = batch.batch["critic_mini_batch_index" if role == "critic" else "mini_batch_index"][
        :, 0
    ]
    lengths = batch.batch["prompt_length"] + batch.batch["response_length"]
    shared = run.plan.sequence_parallel[role]
    groups = batches.spread(
        numbers, lengths, len(run.plan.placement[role]) // shared, run.config.trainer.balance_batch
    )
    assignment = [rows[i::shared] for rows in groups for i in range(shared)]
    if role == "actor":
        run.metrics.update(batches.balance_metrics(lengths, groups))
    return with_ragged(batch, *columns).with_meta(
        assignment=assignment, updates=int(numbers.max()) + 1, step=run.step
    )


def with_ragged(batch: DataProto, *columns: str) -> DataProto:
    """The numbers of each row, its tokens, and those of the named ragged columns that there are; nothing else."""
    return batch.select(
        non_tensor_batch_keys=[
            name for name in (*TOKENS, *columns) if name in batch.non_tensor_batch
        ]
    )


def here(batch: DataProto, *columns: str) -> TensorDict:
    """`with_ragged` as padded tensors on the driver: for what looks at all tokens of a step together."""
    return padded(fetch(with_ragged(batch, *columns))).batch


@stage("old_log_prob")
def old_log_probs(run: Run, batch: DataProto) -> DataProto:
    """Log-probs under the policy before this step's updates: old_log_probs, entropy_sums, gap_sums.

    Skipped where they are provably the ones of the update itself (one update, one epoch, and nobody else asks), which then
    measures the same metrics. The first step of a process computes them all the same, since the start-up gate compares
    them with the rollout's. In the bypass mode the rollout's take their place.

    Raises:
        LogProbGap: trainer and engine disagree by more than `rollout.log_prob_gap_limit`, or there is no token to compare.
    """
    gate, needed = run.first_step, run.plan.needs_old_log_probs
    if run.plan.correction.bypass_mode:
        batch = batch.with_non_tensor(old_log_probs=batch.non_tensor_batch["rollout_log_probs"])
    if not needed and not gate:
        return batch
    answer = run.actor.log_probs(to_ranks(run, batch, "actor", "rollout_log_probs"))
    measured = batch.with_batch(**answer.batch).with_non_tensor(**answer.non_tensor_batch)
    gap, tokens = (
        gap_metrics(gap_totals(answer.batch["gap_sums"])),
        batch.batch["trained_tokens"].sum().item(),
    )
    run.metrics.update(
        gap | {"actor/entropy": answer.batch["entropy_sums"].sum().item() / max(1, tokens)}
    )
    limit = run.config.actor_rollout_ref.rollout.log_prob_gap_limit
    if gate and not gap:
        why = next(filter(None, batch.non_tensor_batch["error"]), "all responses are empty")
        raise LogProbGap(
            f"the first step has no trained token, so that trainer and rollout engine cannot be compared: {why}"
        )
    if gate and not gap["training/log_prob_gap"] <= limit:
        raise LogProbGap(
            f"mean |log p_train - log p_rollout| is {gap['training/log_prob_gap']:.2e} before the first update; "
            f"actor_rollout_ref.rollout.log_prob_gap_limit={limit}. "
            f"{_triage(here(measured, 'old_log_probs', 'rollout_log_probs'))}"
        )
    # Where they are skipped in later steps the update must not see them now either: a resumed run takes the same numbers.
    return measured if needed else batch


def _triage(t: TensorDict) -> str:
    """Where the gap is says what it comes from."""
    gap = (t["old_log_probs"] - t["rollout_log_probs"]).abs()
    mask = t["response_mask"].bool()
    first = torch.zeros_like(mask)
    first[torch.arange(len(mask)), mask.int().argmax(1)] = mask.any(1)
    rest = mask & ~first
    at_first, elsewhere = gap[first].mean().item(), gap[rest].mean().item() if rest.any() else 0.0
    if at_first > 10 * elsewhere:
        return f"It sits on the first response token ({at_first:.1e} there, {elsewhere:.1e} after it): a position is off by one."
    return (
        f"It is on all tokens ({at_first:.1e} on the first, {elsewhere:.1e} after it): look at the weights' dtype "
        "(rollout.dtype, fsdp_config.dtype), at top_p/top_k, or at a model that the engine runs differently."
    )


def correct(run: Run, batch: DataProto) -> DataProto:
    """Importance weights and rejection by `algorithm.rollout_correction`: rollout_is_weights, rejected_tokens, rejected."""
    if not run.plan.correction.acts_on_batch:
        return batch
    t = here(batch, "old_log_probs", "rollout_log_probs")
    weights, mask, metrics = correct_rollout(
        t["old_log_probs"], t["rollout_log_probs"], t["response_mask"], run.plan.correction
    )
    run.metrics.update(metrics)
    rejected, lengths = (t["response_mask"] - mask).bool(), t["response_length"]
    batch = batch.with_batch(rejected=rejected.sum(1)).with_non_tensor(
        rejected_tokens=ragged(rejected, lengths)
    )
    return (
        batch
        if weights is None
        else batch.with_non_tensor(rollout_is_weights=ragged(weights, lengths))
    )


@stage("ref")
def reference_log_probs(run: Run, batch: DataProto) -> DataProto:
    """Log-probs under the frozen reference: ref_log_prob. Only when a KL term uses it. With LoRA it is the actor without its adapters."""
    if run.plan.reference_is_actor:
        return batch.union(run.actor.reference_log_probs(to_ranks(run, batch, "actor")))
    return (
        batch
        if run.reference is None
        else batch.union(run.reference.log_probs(to_ranks(run, batch, "ref")))
    )


@stage("values")
def values(run: Run, batch: DataProto) -> DataProto:
    """The critic's values. Only for estimators that use them."""
    return (
        batch
        if run.critic is None
        else batch.union(run.critic.values(to_ranks(run, batch, "critic")))
    )


@stage("adv")
def advantages(run: Run, batch: DataProto) -> DataProto:
    """From scores to advantages and returns; then what a few methods do to the batch that is trained on.

    Where a row's tokens all get one number, from one number, the tokens stay where they are: advantages and returns are [B, 1].
    """
    algorithm, by_row = run.config.algorithm, needs_no_tokens(run.config)
    if by_row:
        t = batch.batch.clone(recurse=False)
        t["response_mask"] = (t["trained_tokens"] > 0).long()[:, None]
    else:
        t = here(
            batch, "old_log_probs", "ref_log_prob", "values", "sum_pi_squared", "rollout_is_weights"
        )
    scores = rewards = place_scores(t["scores"], t["response_mask"])
    if algorithm.use_kl_in_reward:
        coefficient = run.kl.value
        rewards, kl = apply_kl_penalty(
            rewards,
            t["old_log_probs"],
            t["ref_log_prob"],
            t["response_mask"],
            coefficient,
            algorithm.kl_penalty,
        )
        run.kl.update(kl, len(batch))
        run.metrics.update(
            {"actor/reward_kl_penalty": kl, "actor/reward_kl_penalty_coeff": coefficient}
        )
    inputs = AdvantageInputs(
        token_level_rewards=rewards,
        response_mask=t["response_mask"],
        uid=batch.non_tensor_batch["uid"],
        valid=t["valid"],
        values=t.get("values"),
        reward_baselines=t.get("reward_baselines"),
        token_level_scores=scores,
        old_log_probs=t.get("old_log_probs"),
        sum_pi_squared=t.get("sum_pi_squared"),
        rollout_is_weights=t.get("rollout_is_weights"),
        gamma=algorithm.gamma,
        lam=algorithm.lam,
        norm_adv_by_std_in_grpo=algorithm.norm_adv_by_std_in_grpo,
        reward_clip_range=tuple(run.config.reward.clip_range or (-10.0, 10.0)),
        extra=algorithm.adv_kwargs,
    )
    adv, returns = compute_advantages(algorithm.adv_estimator, inputs)
    batch = without_untrained(run, batch.with_batch(rewards=rewards.sum(1)))
    trained = (
        batch.batch["trained_tokens"][:, None]
        if by_row
        else here(batch, "rejected_tokens")["response_mask"]
    )
    run.metrics.update(token_metrics(adv, returns, trained, t.get("values")))
    if by_row:
        batch = batch.with_batch(advantages=adv, returns=returns)
    else:
        adv, returns = (ragged(values * trained, t["response_length"]) for values in (adv, returns))
        batch = batch.with_non_tensor(advantages=adv, returns=returns)
    return fields.check(with_selected_tokens(run, batch))


def needs_no_tokens(config: Config) -> bool:
    """Whether advantages follow from one number of each row."""
    estimator = catalog.ESTIMATORS.get(config.algorithm.adv_estimator)
    by_row = estimator is not None and estimator.by_row
    return by_row and not config.algorithm.use_kl_in_reward


def without_untrained(run: Run, batch: DataProto) -> DataProto:
    """What rollout correction rejected, and with `algorithm.mask_truncated` the responses that were cut off, leave the loss.

    Only now: their scores are as true as any, and count in the baselines of the others.
    """
    tokens = batch.batch["trained_tokens"]
    if "rejected" in batch.batch.keys():
        tokens = tokens - batch.batch["rejected"]
    if run.config.algorithm.mask_truncated:
        truncated = torch.from_numpy(batch.non_tensor_batch["status"] == Status.LENGTH)
        tokens = tokens.masked_fill(truncated, 0)
        run.metrics["response_length/masked_truncated_ratio"] = truncated.double().mean().item()
    return batch.with_batch(trained_tokens=tokens)


def with_selected_tokens(run: Run, batch: DataProto) -> DataProto:
    """For clip_cov and kl_cov: selected_tokens, chosen over the whole step, so that no split into updates changes them."""
    actor = run.config.actor_rollout_ref.actor
    loss = catalog.LOSSES.get(run.plan.loss_mode)
    if loss is None or loss.selector is None:
        return batch
    t = here(batch, "old_log_probs", "advantages", "rejected_tokens")
    seed = batches.seeds(actor.data_loader_seed, run.step, 0, 1)[0]
    settings = {**vars(actor.policy_loss), "generator": torch.Generator().manual_seed(seed)}
    select = catalog.load(loss.selector)
    selected = select(t["old_log_probs"], t["advantages"], t["response_mask"].bool(), settings)
    return batch.with_non_tensor(selected_tokens=ragged(selected, t["response_length"]))


@stage("update_critic")
def update_critic(run: Run, batch: DataProto) -> None:
    """Fit the critic to the returns."""
    if run.critic is not None:
        run.metrics.update(
            run.critic.update(
                to_ranks(run, batch, "critic", "values", "returns", "rejected_tokens")
            )[0]
        )


@stage("update_actor")
def update_actor(run: Run, batch: DataProto) -> None:
    """Update the policy, once the critic's warm-up is over."""
    if run.step >= run.plan.critic_warmup:
        run.metrics.update(run.actor.update(to_ranks(run, batch, "actor", *_UPDATE))[0])


@stage("testing")
def validate(run: Run) -> dict[str, float]:
    """Generate on the validation set with `rollout.val_kwargs`, score, and return metrics by data source."""
    if run.val_data is None:
        return {}
    val, data = run.config.actor_rollout_ref.rollout.val_kwargs, run.config.data
    rows: list[tuple[str, PromptRow]] = [
        (f"val-{i}", run.val_data.row(i)) for i in range(len(run.val_data)) for _ in range(val.n)
    ]
    greedy = not val.do_sample or val.temperature == 0
    seeds = batches.seeds(run.config.actor_rollout_ref.rollout.seed, 0, 0, len(rows))
    size = (data.val_batch_size or len(run.val_data)) * val.n
    sources, uids, rewards, parts, records, turns = [], [], [], [], [], []
    trajectory_info: dict[str, list[float | None]] = defaultdict(list)
    first_error, shown = "", _at_most(run)
    shown = shown if shown is None else max(shown, run.config.trainer.log_val_generations)
    for start in range(0, len(rows), size):
        chunk = rows[start : start + size]
        samplings = [
            Sampling(
                0.0 if greedy else val.temperature,
                val.top_p,
                val.top_k,
                data.max_response_length,
                seed=seed,
            )
            for seed in seeds[start : start + size]
        ]
        requests = batches.requests([row for _, row in chunk], [uid for uid, _ in chunk], samplings)
        batch = answered(run, requests, sleep_after=False)
        valid, totals = batch.batch["valid"].tolist(), batch.batch["raw_scores"].tolist()
        sources += list(batch.non_tensor_batch["data_source"])
        uids += list(batch.non_tensor_batch["uid"])
        rewards += [total if ok else None for total, ok in zip(totals, valid, strict=True)]
        parts += list(batch.non_tensor_batch["reward_parts"])
        records += sample_records(
            run, batch[: None if shown is None else max(0, shown - len(records))]
        )
        turns += batch.batch["turns"].tolist()
        for name, values in (sample_numbers(batch) if run.env_factory else {}).items():
            trajectory_info[name] += [
                value if ok else None for value, ok in zip(values, valid, strict=True)
            ]
        first_error = (
            first_error
            or reward_failures(batch)[1]
            or next(filter(None, batch.non_tensor_batch["error"]), "")
        )
    numeric = sorted(
        {name for p in parts for name, value in p.items() if isinstance(value, (int, float))}
    )
    variables = {
        "reward": rewards,
        **trajectory_info,
        **{name: [p.get(name) for p in parts] for name in numeric if name != "reward"},
    }
    _write_jsonl(run.run_dir / "rollouts" / f"val_step_{run.step}.jsonl", records[: _at_most(run)])
    failed = sum(reward is None for reward in rewards)
    if failed == len(rewards):
        raise RewardFailures(
            f"none of the {failed} validation samples could be scored. The first failure:\n{first_error.rstrip()}"
        )
    if failed:
        run.display.warn(
            f"{failed} of {len(rewards)} validation samples could not be scored and are left out; first: {first_error}"
        )
    for record in records[: run.config.trainer.log_val_generations]:
        run.display.say(
            f"{record['prompt']}{record['response']}  [score {record['score']}, expected {record['ground_truth']}]"
        )
    return {
        **validation_metrics(sources, uids, variables, [p.get("pred") for p in parts]),
        **spread("val-aux/num_turns", torch.tensor(turns)),
        "val-aux/error_rate": failed / len(rewards),
    }


def sample_records(run: Run, batch: DataProto) -> list[dict]:
    """What a person wants to see of each sample: prompt, response, score and its parts, status, versions."""
    t, columns = (
        batch.batch,
        fetch(batch, [name for name in _SHOWN if name in batch.non_tensor_batch]).non_tensor_batch,
    )
    scores = t.get("scores", t["raw_scores"]).tolist()
    return [
        {
            "uid": columns["uid"][i],
            "index": columns["index"][i],
            "data_source": columns["data_source"][i],
            "prompt": run.tokenizer.decode(columns["prompt_ids"][i]),
            "response": columns["text"][i],
            "ground_truth": columns["ground_truth"][i],
            "score": scores[i] if t["valid"][i] else None,
            **(
                {"raw_score": t["raw_scores"][i].item()}
                if t["valid"][i] and t["raw_scores"][i] != scores[i]
                else {}
            ),
            "reward_parts": columns["reward_parts"][i],
            "status": columns["status"][i],
            "error": columns["error"][i],
            "response_tokens": int(t["response_length"][i]),
            "trained_tokens": int(t["trained_tokens"][i]),
            "weight_version": int(t["weight_version"][i]),
            **(
                {name: columns[name][i] for name in ("transcript", "turn_infos") if name in columns}
            ),
        }
        for i in range(len(batch))
    ]


def keep_samples(run: Run, batch: DataProto) -> None:
    """Write a few of the step's samples to rollouts/step_N.jsonl."""
    _write_jsonl(
        run.run_dir / "rollouts" / f"step_{run.step}.jsonl",
        sample_records(run, batch[: _at_most(run)]),
    )


def _at_most(run: Run) -> int | None:
    count = run.config.trainer.rollouts_per_step
    return None if count < 0 else count


def _write_jsonl(path, records: list[dict]) -> None:
    path.parent.mkdir(exist_ok=True)
    text = "".join(json.dumps(record, ensure_ascii=False, default=str) + "\n" for record in records)
    # A lone surrogate, which a model can write as an escape in a call's JSON, is kept as that escape.
    path.write_text(text, encoding="utf-8", errors="backslashreplace")
