"""The rollout phase: choose prompts, sample responses, score them, filter groups."""

from collections.abc import Mapping, Sequence

import torch

from verlite.algorithms.advantages import overlong_penalty, rows_with_signal, shape_scores
from verlite.algorithms.masked import masked_mean
from verlite.protocol.data import DataProto, object_array
from verlite.protocol.ragged import clear_rows
from verlite.rewards.result import BadReturn
from verlite.rollout.types import Sampling, Status
from verlite.spec import catalog
from verlite.trainer import batch as batches
from verlite.trainer.errors import RewardFailures, RolloutFailures, TooFewGroups
from verlite.trainer.failed_rewards import describe, failed_rows, warn_of_new_kinds
from verlite.trainer.outage import generate_with_retry, waits_for_services
from verlite.trainer.run import Run, stage
from verlite.trainer.stages.weights import call_engines

REQUEST_FIELDS = (
    *("prompt_ids", "sampling", "messages"),
    *("data_source", "ground_truth", "extra_info"),
)
"""What a rollout worker needs to generate and score a response. Agent programs get the messages."""


def rollout(run: Run) -> DataProto:
    """Sample responses to the step's prompts and score them.

    With `algorithm.filter_groups` (DAPO's dynamic sampling) only prompts whose samples differ are
    kept, and this repeats with further prompts until the step is full.
    """
    batch = DataProto()
    while len(batch) < run.plan.batch_size:
        samples = next_prompts(run)
        samples = generate(run, samples)
        samples = score(run, samples)
        batch = filter_groups(run, batch, samples)
    return batch


@stage()
def next_prompts(run: Run) -> DataProto:
    """Draw the next prompts; return the rows of their samples (`requests_of`)."""
    config = run.config.actor_rollout_ref.rollout
    rows = run.sampler.next_batch()
    drawn = run.current.prompts_drawn
    uids = [f"{run.step}-{drawn + i}" for i in range(len(rows))]
    seeds = batches.seeds(config.seed, run.step, drawn, len(rows) * config.n)
    run.current.prompts_drawn += len(rows)
    return requests_of(run, rows, uids, seeds)


def requests_of(
    run: Run, numbers: Sequence[int], uids: Sequence[str], seeds: Sequence[int]
) -> DataProto:
    """Return `rollout.n` rows per prompt, each with its sampling parameters.

    The rows of a prompt share a uid. ReMax adds one greedy row per prompt.

    Args:
        numbers: rows of the training data.
        seeds: of each sample.
    """
    config = run.config.actor_rollout_ref.rollout
    max_tokens = run.config.data.max_response_length
    rows = [run.train_data.row(number) for number in numbers]
    prompts = list(zip(rows, uids, strict=True))
    samples = [prompt for prompt in prompts for _ in range(config.n)]
    samplings = [
        Sampling(
            config.temperature,
            config.top_p,
            config.top_k,
            max_tokens,
            seed=seed,
            ignore_eos=config.ignore_eos,
        )
        for seed in seeds
    ]
    if run.plan.needs_greedy_baseline:
        samples += prompts
        samplings += [Sampling(0.0, 1.0, -1, max_tokens)] * len(prompts)
    return batches.requests([row for row, _ in samples], [uid for _, uid in samples], samplings)


@stage("gen")
def generate(run: Run, requests: DataProto) -> DataProto:
    """Sample a response to each request. The rollout workers also score each finished response.

    Raises:
        RolloutFailures: More than `rollout.max_error_rate` of the samples failed.
    """
    # With filter_groups the engines stay awake: the step's next generation needs their weights.
    sleep_after = not run.plan.filters_groups
    return check_failed_samples(run, sample_responses(run, requests, sleep_after))


def check_failed_samples(run: Run, batch: DataProto) -> DataProto:
    """Return the batch. Raises RolloutFailures; see `generate`."""
    failed = torch.from_numpy(batch.non_tensor_batch["status"] == Status.ERROR)
    rate = failed.double().mean().item()
    limit = run.config.actor_rollout_ref.rollout.max_error_rate
    if rate <= limit:
        return batch
    first_error = batch.non_tensor_batch["error"][failed.nonzero()[0, 0]]
    raise RolloutFailures(
        f"{rate:.1%} of this step's samples could not be generated, more than "
        f"actor_rollout_ref.rollout.max_error_rate={limit:g} allows. "
        f"The first failure: {first_error}"
    )


def sample_responses(run: Run, requests: DataProto, sleep_after: bool) -> DataProto:
    """Send the requests to the rollout workers; return their rows with responses and rewards."""
    sent = requests.select([], REQUEST_FIELDS)
    other_columns = requests.pop(non_tensor_batch_keys=["prompt_ids"])[1]
    if not waits_for_services(run):
        generate = run.rollout.generate
        return other_columns.union(
            call_engines(run, generate, sleep_after, sent, sleep_after=sleep_after)
        )
    answers = generate_with_retry(run, sent)
    if sleep_after:
        run.rollout.sleep()
    return other_columns.union(answers)


@stage("reward")
def score(run: Run, batch: DataProto) -> DataProto:
    """Turn raw scores into the scores that training uses.

    ReMax: the greedy rows leave the batch, and their scores become `reward_baselines`.

    Raises:
        RewardFailures: More than `reward.max_error_rate` of the rewards failed.
    """
    if run.groups is None:  # otherwise nothing has waited for them
        run.stopwatch.seconds["reward"] += batch.batch["reward_seconds"].max().item()
    batch = with_reward_parts(run, batch)
    limit = run.config.reward.max_error_rate
    failed = failed_rows(batch)
    rate = len(failed) / max(1, int((batch.non_tensor_batch["status"] != Status.ERROR).sum()))
    if rate > limit:
        raise RewardFailures(
            f"{rate:.1%} of this step's rewards failed, more than reward.max_error_rate={limit:g} "
            f"allows. The first failure:\n{describe(run, batch, failed[0])}\n"
            "Correct the reward function, or raise reward.max_error_rate: samples without a "
            "reward are then left out of the update."
        )
    warn_of_new_kinds(run, batch)
    return trained_samples(run, batch).with_meta(reward_error_rate=rate)


def with_reward_parts(run: Run, batch: DataProto) -> DataProto:
    """Add `gdpo_rewards`, if the estimator compares parts of the reward."""
    if "gdpo_rewards" not in catalog.estimator(run.config.algorithm.adv_estimator).measured:
        return batch
    return with_gdpo_rewards(batch, run.config.algorithm.gdpo_reward_keys or [])


def trained_samples(run: Run, batch: DataProto) -> DataProto:
    """Return the samples that are trained, with `scores` and, for ReMax, `reward_baselines`."""
    batch = shape_rewards(run, batch)
    greedy = torch.tensor([s.temperature == 0 for s in batch.non_tensor_batch["sampling"]])
    if not greedy.any():
        return batch
    return with_baselines(batch.select_idxs(~greedy), batch.select_idxs(greedy))


def shape_rewards(run: Run, batch: DataProto) -> DataProto:
    """Add `scores`: raw scores normalized, clipped, and penalized for length.

    The score of a row without sampled tokens that count is 0.
    """
    reward = run.config.reward
    t = batch.batch
    # rloo_token_kl clips after subtracting its baseline.
    clips_later = run.config.algorithm.adv_estimator == "rloo_token_kl"
    clip_range = None
    if reward.clip_range is not None and not clips_later:
        low, high = reward.clip_range
        clip_range = (low, high)
    scores = shape_scores(t["raw_scores"], reward.mean, reward.std, clip_range)
    if reward.overlong_buffer.enable:
        penalty = overlong_penalty(
            t["response_length"],
            reward.overlong_buffer.max_resp_len or run.config.data.max_response_length,
            run.plan.overlong_buffer,
            reward.overlong_buffer.penalty_factor,
        )
        scores = scores + penalty
        batch = batch.with_batch(overlong_penalty=penalty)
    return batch.with_batch(scores=scores.masked_fill(t["sampled_tokens"] == 0, 0))


def with_gdpo_rewards(batch: DataProto, names: Sequence[str]) -> DataProto:
    """Add `gdpo_rewards`: the parts `names` of each row's reward.

    A valid row that lacks one of these numbers, or has one that is not finite in float32, has a
    failed reward.
    """
    t = batch.batch
    rows = [[0.0] * len(names) for _ in range(len(batch))]
    failures = {}
    for row in t["valid"].nonzero().flatten().tolist():
        parts = batch.non_tensor_batch["reward_parts"][row]
        score = t["raw_scores"][row].item()
        for column, name in enumerate(names):
            value = reward_number(name, parts, score)
            if value is not None and abs(value) <= torch.finfo(torch.float32).max:
                rows[row][column] = value
                continue
            wrong = f"is {value}" if value is not None else "is missing or not a number"
            failures[row] = (
                f"the reward part {name} of algorithm.gdpo_reward_keys {wrong}; the reward "
                f"function returned the numbers {', '.join(reward_numbers(parts))}"
            )
            break
    batch = batch.with_batch(gdpo_rewards=torch.tensor(rows, dtype=torch.float64))
    errors = {row: f"reward: {BadReturn.__name__}" for row in failures}
    tracebacks = list(batch.non_tensor_batch["reward_traceback"])
    for row, text in failures.items():
        tracebacks[row] = text
    return exclude(batch, errors).with_non_tensor(reward_traceback=object_array(tracebacks))


def reward_number(name: str, parts: Mapping[str, float | str], score: float) -> float | None:
    """Return the number `name` of a reward, None if it has none: a part, or `score` itself.

    `acc` is the score if the reward has no such part: built-in scorers on the scale zero_one do not
    return `acc`, because their score is the accuracy.
    """
    if name == "score":
        return score
    value = parts.get(name, score if name == "acc" else None)
    return value if isinstance(value, int | float) else None


def reward_numbers(parts: Mapping[str, float | str]) -> list[str]:
    """Return the names of a reward's numbers, "score" first."""
    return ["score", *sorted(name for name, part in parts.items() if isinstance(part, int | float))]


def with_baselines(batch: DataProto, greedy: DataProto) -> DataProto:
    """Add `reward_baselines`: the score of the greedy response to the same prompt.

    Rows whose greedy response failed are excluded.
    """
    t = batch.batch
    greedy_scores = zip(
        greedy.non_tensor_batch["uid"],
        greedy.batch["scores"].tolist(),
        greedy.batch["valid"].tolist(),
        strict=True,
    )
    baselines = {uid: score for uid, score, valid in greedy_scores if valid}
    uids = batch.non_tensor_batch["uid"]
    without_baseline = torch.tensor([uid not in baselines for uid in uids])
    error = "the greedy response to this prompt failed, so the row has no baseline"
    failed = (t["valid"] & without_baseline).nonzero().flatten().tolist()
    return exclude(batch, dict.fromkeys(failed, error)).with_batch(
        reward_baselines=torch.tensor([baselines.get(uid, 0.0) for uid in uids])
    )


def exclude(batch: DataProto, errors: Mapping[int, str]) -> DataProto:
    """Make rows invalid: they are excluded from the loss and from all statistics.

    Args:
        errors: row -> why.
    """
    t = batch.batch
    failed = torch.zeros_like(t["valid"])
    failed[list(errors)] = True
    texts = [errors.get(row, text) for row, text in enumerate(batch.non_tensor_batch["error"])]
    mask = batch.non_tensor_batch["response_mask"]
    return batch.with_batch(
        valid=t["valid"] & ~failed, sampled_tokens=t["sampled_tokens"].masked_fill(failed, 0)
    ).with_non_tensor(
        error=object_array(texts), response_mask=clear_rows(mask, t["response_length"], failed)
    )


def filter_groups(run: Run, batch: DataProto, samples: DataProto) -> DataProto:
    """Append the new samples whose group has different scores to the step's batch.

    This is DAPO's dynamic sampling (arXiv:2503.14476, section 3.2). Without
    `algorithm.filter_groups` it returns the new samples. When the batch has `data.train_batch_size`
    prompts, it drops surplus prompts and puts the engines to sleep.

    Raises:
        TooFewGroups: The step is not full after `filter_groups.max_num_gen_batches` generations,
            or after one pass over the data.
    """
    if not run.plan.filters_groups:
        return samples
    plan = run.plan
    informative = samples.select_idxs(with_signal(run, samples))
    generations = generations_of(run, run.current.prompts_drawn)
    _average_over_generations(run, samples, len(informative), generations)
    parts = [part for part in (batch, informative) if len(part)]
    collected = informative
    if parts:
        collected = DataProto.concat([part.select(meta_info_keys=[]) for part in parts])
    batch = collected[: plan.batch_size].with_meta(
        reward_error_rate=run.metrics["reward/error_rate"]
    )
    if len(batch) == plan.batch_size:
        sleep(run)
        return batch
    kept = len(batch) // plan.samples_per_prompt
    check_generations(run, generations + 1, kept, run.metrics["filter_groups/score/mean"])
    return batch


def with_signal(run: Run, samples: DataProto) -> torch.Tensor:
    """Return the rows [B] whose group has different values of `filter_groups.metric`."""
    metric = _filter_metric(samples, run.config.algorithm.filter_groups.metric or "score")
    uids = samples.non_tensor_batch["uid"]
    return rows_with_signal(metric, uids, samples.batch["valid"])


def generations_of(run: Run, prompts: int) -> int:
    """Return how many generations of `data.gen_batch_size` prompts have that many prompts."""
    return -(-prompts // run.plan.gen_prompts)


def check_generations(run: Run, needed: int, kept: int, mean_score: float) -> None:
    """Raise TooFewGroups if a step needs more generations than it may take: one pass over the data,
    unless `filter_groups.max_num_gen_batches` says it.

    Args:
        needed: generations of the step so far, with the next one if it is not full.
        kept: prompts of the step so far.
        mean_score: of all samples of the step, before filtering.
    """
    limit = run.config.algorithm.filter_groups.max_num_gen_batches
    if needed <= (limit or generations_of(run, len(run.train_data))):
        return
    plan, name = run.plan, run.config.algorithm.filter_groups.metric or "score"
    raise TooFewGroups(
        f"after {needed - 1} generations of {plan.gen_prompts} prompts, only {kept} of "
        f"data.train_batch_size={plan.prompts} have samples whose {name} differs (mean score "
        f"{mean_score:.3g}): the other prompts are too easy or too hard for this policy. Use other "
        "prompts, raise actor_rollout_ref.rollout.n or temperature, allow more with "
        "algorithm.filter_groups.max_num_gen_batches, or train on all with "
        "algorithm.filter_groups.enable=false."
    )


def _average_over_generations(
    run: Run, samples: DataProto, kept_rows: int, generations: int
) -> None:
    """Update the step's metrics of dynamic sampling: running means over its generations."""
    scores = samples.batch["raw_scores"]
    values = {
        "filter_groups/kept_ratio": kept_rows / len(samples),
        "filter_groups/score/mean": masked_mean(scores, samples.batch["valid"]).item(),
        "reward/error_rate": samples.meta_info["reward_error_rate"],
    }
    for key, value in values.items():
        before = run.metrics.get(key, 0.0)
        run.metrics[key] = before + (value - before) / generations
    run.metrics["train/num_gen_batches"] = float(generations)


@stage("gen")
def sleep(run: Run) -> None:
    """Free the engines' device memory for training."""
    run.rollout.sleep()


def _filter_metric(batch: DataProto, name: str) -> torch.Tensor:
    """Return the number [B] that must differ between the samples of a prompt.

    Raises:
        TooFewGroups: A valid row does not have the number.
    """
    if name == "seq_reward":
        return batch.batch["scores"]
    rows = zip(
        batch.non_tensor_batch["reward_parts"],
        batch.batch["raw_scores"].tolist(),
        batch.batch["valid"].tolist(),
        strict=True,
    )
    values = []
    for parts, raw_score, valid in rows:
        value = reward_number(name, parts, raw_score)
        if valid and value is None:
            raise TooFewGroups(
                f"algorithm.filter_groups.metric={name}: the reward function did not return this "
                f"number for each sample. It returned: {', '.join(reward_numbers(parts))}."
            )
        values.append(value if valid else 0.0)
    return torch.tensor(values, dtype=torch.float64)
