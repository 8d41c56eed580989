"""Naive references written from the formulas of the papers.

They loop over rows and tokens in Python floats (float64) and share no code with verlite. Random
cases cover rows of different lengths, tool text inside responses, empty rows, failed rows, groups
of one, equal rewards, rows in random order, and NaN wherever the mask is 0.
"""

import math
import random
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

LIMIT = 20.0


@dataclass
class Case:
    """One random batch of tensors [B, R].

    Entries are NaN where the mask is 0, so a function that reads them returns NaN.
    """

    rewards: Tensor
    mask: Tensor
    uid: np.ndarray
    valid: Tensor
    values: Tensor
    old: Tensor
    log_prob: Tensor
    ref: Tensor
    advantages: Tensor
    baselines: Tensor
    scores: Tensor
    pi_squared: Tensor
    is_weights: Tensor
    parts: Tensor
    """[B, 3], without NaN."""

    @property
    def shape(self) -> tuple[int, int]:
        return tuple(self.mask.shape)  # type: ignore[return-value]

    @cached_property
    def columns(self) -> list[list[int]]:
        """Trainable columns of each row. Rows that are not valid have an empty list."""
        return [
            [t for t, m in enumerate(row) if m and ok]
            for row, ok in zip(self.mask.tolist(), self.valid.tolist(), strict=True)
        ]

    @cached_property
    def row_scores(self) -> list[float]:
        return [sum(float(self.rewards[i, t]) for t in row) for i, row in enumerate(self.columns)]

    def tokens_of(self, row: int) -> list[int]:
        return self.columns[row]

    def counted_rows(self) -> list[int]:
        """Return the valid rows that have trainable tokens."""
        return [i for i, row in enumerate(self.columns) if row]

    def group(self, row: int) -> list[int]:
        """Return the counted rows with the uid of `row`."""
        return [i for i in self.counted_rows() if self.uid[i] == self.uid[row]]

    def score(self, row: int) -> float:
        return self.row_scores[row]

    def score_without_kl(self, row: int) -> float:
        """Return the score of a row without the KL penalty."""
        return sum(float(self.scores[row, t]) for t in self.tokens_of(row))


def random_case(seed: int) -> Case:
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    groups, width = rng.randint(1, 4), rng.randint(1, 12)
    uid = [f"prompt-{g}" for g in range(groups) for _ in range(rng.choice([1, 1, 2, 3, 4]))]
    rng.shuffle(uid)
    rows = len(uid)
    mask = torch.zeros(rows, width, dtype=torch.int64)
    for i in range(rows):
        length = rng.choice([0, 1, width, rng.randint(0, width)])
        mask[i, :length] = 1
        if length > 2 and rng.random() < 0.5:  # tool text between two turns
            start = rng.randint(0, length - 1)
            mask[i, start : rng.randint(start, length)] = 0
    valid = torch.tensor([rng.random() > 0.15 for _ in range(rows)])

    def field(scale: float = 1.0) -> Tensor:
        return (torch.randn(rows, width, generator=generator) * scale).masked_fill(
            mask == 0, math.nan
        )

    rewards = field(0.1)
    equal = rng.random() < 0.2
    for i in range(rows):
        columns = mask[i].nonzero().flatten().tolist()
        if equal:
            rewards[i] = torch.where(mask[i] == 1, 0.0, math.nan)
        if columns:
            rewards[i, columns[-1]] = 1.0 if equal else float(rng.choice([0, 1, rng.random(), -3]))
    if rng.random() < 0.3:
        rewards = rewards.masked_fill(
            ~valid.unsqueeze(1), math.nan
        )  # the reward of a failed row is arbitrary
    old = -field().abs()
    log_prob = (old + field(rng.choice([0.01, 0.3, 3.0]))).clamp(max=-1e-3)
    for i, t in mask.nonzero().tolist():
        if rng.random() < 0.03:
            old[i, t], log_prob[i, t] = rng.choice(
                [(-65.0, -5.0), (-5.0, -65.0), (-5.0, -math.inf)]
            )
    advantages = field()
    advantages[torch.rand(rows, width, generator=generator) < 0.1] = 0
    advantages = advantages.masked_fill(mask == 0, math.nan)
    scores = rewards - field(0.2)
    pi_squared = torch.rand(rows, width, generator=generator).masked_fill(mask == 0, math.nan)
    return Case(
        rewards,
        mask,
        np.array(uid, dtype=object),
        valid,
        field(),
        old,
        log_prob,
        old + field(0.5),
        advantages,
        torch.randn(rows, generator=generator),
        scores,
        pi_squared,
        field().abs(),
        random_parts(rows, generator),
    )


def random_parts(rows: int, generator: torch.Generator) -> Tensor:
    """Return three parts of a reward, [B, 3]: 0 or 1, a large one, and one that rarely differs."""
    drawn = torch.rand(rows, 3, generator=generator)
    return torch.stack([drawn[:, 0].round(), 1000 * drawn[:, 1], (drawn[:, 2] > 0.9) * 0.1], 1)


def zeros(case: Case) -> np.ndarray:
    return np.zeros(case.shape)


def whiten(x: np.ndarray, case: Case) -> np.ndarray:
    kept = [(i, t) for i in case.counted_rows() for t in case.tokens_of(i)]
    out = zeros(case)
    if not kept:
        return out
    mean = sum(x[i, t] for i, t in kept) / len(kept)
    variance = (
        sum((x[i, t] - mean) ** 2 for i, t in kept) / (len(kept) - 1) if len(kept) > 1 else 0.0
    )
    for i, t in kept:
        out[i, t] = (x[i, t] - mean) / math.sqrt(variance + 1e-8)
    return out


def to_go(case: Case, gamma: float) -> np.ndarray:
    out = zeros(case)
    for i in case.counted_rows():
        running = 0.0
        for t in reversed(case.tokens_of(i)):
            running = float(case.rewards[i, t]) + gamma * running
            out[i, t] = running
    return out


def fill_rows(case: Case, row_value) -> np.ndarray:
    """Write row_value(i) to all trainable tokens of row i. Groups of one keep 0."""
    out = zeros(case)
    for i in case.counted_rows():
        if len(case.group(i)) > 1:
            for t in case.tokens_of(i):
                out[i, t] = row_value(i)
    return out


def group_mean(case: Case, row: int) -> float:
    return sum(case.score(j) for j in case.group(row)) / len(case.group(row))


def group_std(case: Case, row: int) -> float:
    mean, members = group_mean(case, row), case.group(row)
    return math.sqrt(sum((case.score(j) - mean) ** 2 for j in members) / (len(members) - 1))


def gae(case: Case, gamma: float, lam: float) -> tuple[np.ndarray, np.ndarray]:
    raw, returns = zeros(case), zeros(case)
    for i in case.counted_rows():
        columns = case.tokens_of(i)
        for n, t in enumerate(columns):
            total = 0.0
            for m in range(n, len(columns)):  # the sum in the definition, not the recursion
                upcoming = float(case.values[i, columns[m + 1]]) if m + 1 < len(columns) else 0.0
                delta = (
                    float(case.rewards[i, columns[m]])
                    + gamma * upcoming
                    - float(case.values[i, columns[m]])
                )
                total += (gamma * lam) ** (m - n) * delta
            raw[i, t] = total
            returns[i, t] = total + float(case.values[i, t])
    return whiten(raw, case), returns


def grpo(case: Case, by_std: bool) -> np.ndarray:
    return fill_rows(
        case,
        lambda i: (
            (case.score(i) - group_mean(case, i)) / (group_std(case, i) + 1e-6 if by_std else 1.0)
        ),
    )


def gdpo(case: Case, weights: tuple[float, ...]) -> np.ndarray:
    def one(i: int) -> float:
        members, total = case.group(i), 0.0
        for k, weight in enumerate(weights):
            parts = {j: float(case.parts[j, k]) for j in members}
            mean = sum(parts.values()) / len(members)
            squares = sum((part - mean) ** 2 for part in parts.values())
            total += weight * (parts[i] - mean) / (math.sqrt(squares / (len(members) - 1)) + 1e-6)
        return total

    return whiten(fill_rows(case, one), case)


def rloo(case: Case) -> np.ndarray:
    def one(i: int) -> float:
        others = [case.score(j) for j in case.group(i) if j != i]
        return case.score(i) - sum(others) / len(others)

    return fill_rows(case, one)


def reinforce_plus_plus(case: Case, gamma: float) -> tuple[np.ndarray, np.ndarray]:
    returns = to_go(case, gamma)
    return whiten(returns, case), returns


def reinforce_plus_plus_baseline(case: Case) -> np.ndarray:
    return whiten(fill_rows(case, lambda i: case.score(i) - group_mean(case, i)), case)


def remax(case: Case, gamma: float) -> tuple[np.ndarray, np.ndarray]:
    returns, out = to_go(case, gamma), zeros(case)
    for i in case.counted_rows():
        for t in case.tokens_of(i):
            out[i, t] = returns[i, t] - float(case.baselines[i])
    return out, returns


def grpo_passk(case: Case, by_std: bool) -> np.ndarray:
    def one(i: int) -> float:
        ranked = sorted(case.group(i), key=lambda j: (-case.score(j), j))
        if i != ranked[0]:
            return 0.0
        gap = case.score(ranked[0]) - case.score(ranked[1])
        return gap / (group_std(case, i) + 1e-6) if by_std else gap

    return fill_rows(case, one)


def opo(case: Case) -> np.ndarray:
    def one(i: int) -> float:
        lengths = {j: len(case.tokens_of(j)) for j in case.group(i)}
        return case.score(i) - sum(n * case.score(j) for j, n in lengths.items()) / sum(
            lengths.values()
        )

    return fill_rows(case, one)


def gpg(case: Case) -> np.ndarray:
    rewarded = sum(float(np.float32(case.score(i))) != 0 for i in case.counted_rows())
    alpha = len(case.counted_rows()) / max(rewarded, 1)
    return fill_rows(case, lambda i: alpha * (case.score(i) - group_mean(case, i)))


def rloo_token_kl(case: Case, low: float, high: float) -> np.ndarray:
    out = zeros(case)
    for i in case.counted_rows():
        others = [case.score_without_kl(j) for j in case.group(i) if j != i]
        score = (
            min(max(case.score_without_kl(i) - sum(others) / len(others), low), high)
            if others
            else 0.0
        )
        columns = case.tokens_of(i)
        for n, t in enumerate(columns):
            out[i, t] = score + sum(
                float(case.rewards[i, u]) - float(case.scores[i, u]) for u in columns[n:]
            )
    return out


def optimal_token_baseline(
    case: Case, gamma: float, weighted: bool
) -> tuple[np.ndarray, np.ndarray]:
    returns, out = to_go(case, gamma), zeros(case)

    def energy(i: int, rank: int) -> float:
        total = 0.0
        for t in case.tokens_of(i)[: rank + 1]:
            w = 1 - 2 * math.exp(float(case.old[i, t])) + float(case.pi_squared[i, t])
            total += w * float(case.is_weights[i, t]) ** 2 if weighted else w
        return total

    for i in case.counted_rows():
        if len(case.group(i)) < 2:
            continue
        for rank, t in enumerate(case.tokens_of(i)):
            members = [j for j in case.group(i) if len(case.tokens_of(j)) > rank]
            baseline = 0.0
            if len(members) > 1:
                below = sum(energy(j, rank) for j in members)
                baseline = sum(
                    returns[j, case.tokens_of(j)[rank]] * energy(j, rank) for j in members
                ) / max(below, 1e-8)
            out[i, t] = returns[i, t] - baseline
    return out, returns


def row_weights(mask: Tensor, mode: str, scale: float) -> list[float]:
    """Return the weight of a trainable token of each row. The case is one whole optimizer step."""
    lengths = [sum(row) for row in mask.tolist()]
    tokens, sequences = max(sum(lengths), 1), max(sum(n > 0 for n in lengths), 1)
    return [
        {
            "token-mean": 1 / tokens,
            "token-sum": 1.0,
            "seq-mean-token-sum": 1 / sequences,
            "seq-mean-token-mean": 1 / (sequences * max(length, 1)),
            "seq-mean-token-sum-norm": 1 / (sequences * scale),
        }[mode]
        for length in lengths
    ]


def log_ratio(new: float, old: float) -> float:
    return min(max(max(new, -1e4) - old, -LIMIT), LIMIT)


def ratio_gradient(new: float, old: float) -> float:
    """Return d ratio / d log_prob, which is the ratio, or 0 where the log-ratio is clamped."""
    inside = math.isfinite(new) and abs(new - old) <= LIMIT
    return math.exp(log_ratio(new, old)) if inside else 0.0


def ppo_token(
    new: float, old: float, advantage: float, s: dict, worst: float = math.inf
) -> tuple[float, float]:
    """Return the clipped PPO loss of one token and its derivative with respect to log_prob."""
    ratio = math.exp(log_ratio(new, old))
    clipped = min(max(ratio, 1 - s["clip_low"]), 1 + s["clip_high"])
    first, second = -advantage * ratio, -advantage * clipped
    loss, slope = first, -advantage * ratio_gradient(new, old)
    if second > first:
        loss, slope = second, 0.0
    if advantage < 0 and loss > -advantage * worst:
        loss, slope = -advantage * worst, 0.0
    return loss, slope


def sapo_token(new: float, old: float, advantage: float, s: dict) -> tuple[float, float]:
    tau = 1.0 if advantage > 0 else 1.05
    x = tau * (math.exp(log_ratio(new, old)) - 1)
    sigmoid = 1 / (1 + math.exp(-x)) if x > -700 else 0.0
    return -advantage * sigmoid * 4 / tau, -advantage * 4 * sigmoid * (
        1 - sigmoid
    ) * ratio_gradient(new, old)


def weighted_gradient_token(factor: float, new: float, advantage: float) -> tuple[float, float]:
    """Return -A * factor * log_prob and its derivative. The factor is a constant."""
    return -advantage * factor * max(new, -1e4), -advantage * factor if math.isfinite(new) else 0.0


def cispo_token(new: float, old: float, advantage: float, s: dict) -> tuple[float, float]:
    factor = min(max(math.exp(log_ratio(new, old)), 1 - s["clip_low"]), 1 + s["clip_high"])
    return weighted_gradient_token(factor, new, advantage)


def is_inside_trust_region(
    new: float, old: float, advantage: float, s: dict, distance: str
) -> bool:
    p, p_old = math.exp(max(new, -1e4)), math.exp(max(old, -1e4))
    if distance == "tv":
        return p - p_old <= s["clip_high"] if advantage > 0 else p_old - p <= s["clip_low"]
    kl = p_old * (max(old, -1e4) - max(new, -1e4)) + (1 - p_old) * math.log(
        (1 - p_old + 1e-8) / (1 - p + 1e-8)
    )
    outside = kl > (s["clip_high"] if advantage > 0 else s["clip_low"])
    return not (outside and (p > p_old if advantage > 0 else p < p_old))


def dppo_token(
    new: float, old: float, advantage: float, s: dict, distance: str
) -> tuple[float, float]:
    inside = is_inside_trust_region(new, old, advantage, s, distance)
    factor = min(math.exp(log_ratio(new, old)), s["clip_c"]) if inside else 0.0
    return weighted_gradient_token(factor, new, advantage)


def kl_cov_token(
    new: float, old: float, advantage: float, s: dict, selected: bool
) -> tuple[float, float]:
    d = log_ratio(new, old)
    loss, slope = -advantage * math.exp(d), -advantage * ratio_gradient(new, old)
    if selected:
        loss += s["ppo_kl_coef"] * abs(d)
        slope += s["ppo_kl_coef"] * math.copysign(1, d) if ratio_gradient(new, old) and d else 0.0
    return loss, slope


def kl_token(kind: str, new: float, ref: float) -> tuple[float, float]:
    """Return the KL estimate of one token and its derivative with respect to log_prob.

    The derivative is 0 if the log-prob is below the floor of -1e4.
    """
    d = max(new, -1e4) - max(ref, -1e4)
    x = min(max(-d, -LIMIT), LIMIT)
    excess = math.exp(x) - 1 - x
    straight = {
        "k1": (d, 1.0),
        "abs": (abs(d), math.copysign(1.0, d) if d else 0.0),
        "k2": (d * d / 2, d),
        "k3": (min(excess, 10.0), 1 - math.exp(x) if excess <= 10 and abs(d) <= LIMIT else 0.0),
    }
    names = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}
    base = kind.removesuffix("+")
    value, slope = straight[names.get(base, base)]
    if kind.endswith("+"):
        slope = d
    return value, slope if new >= -1e4 else 0.0


def gspo_row(
    case: Case, i: int, weights: dict[int, float], s: dict
) -> tuple[float, dict[int, float]]:
    mean = sum(
        max(float(case.log_prob[i, t]), -1e4) - float(case.old[i, t]) for t in weights
    ) / len(weights)
    ratio = math.exp(min(mean, 10))
    loss, slopes = 0.0, {}
    for t, w in weights.items():
        advantage = float(case.advantages[i, t])
        clipped = min(max(ratio, 1 - s["clip_low"]), 1 + s["clip_high"])
        moving = (
            mean <= 10
            and -advantage * ratio >= -advantage * clipped
            and math.isfinite(float(case.log_prob[i, t]))
        )
        loss += w * max(-advantage * ratio, -advantage * clipped)
        slopes[t] = -w * advantage * ratio if moving else 0.0
    return loss, slopes


def geo_mean_row(
    case: Case, i: int, weights: dict[int, float], s: dict
) -> tuple[float, dict[int, float]]:
    bounded, moving = {}, {}
    for t in weights:
        new, old, advantage = (float(x[i, t]) for x in (case.log_prob, case.old, case.advantages))
        d = log_ratio(new, old)
        if advantage > 0:
            bounded[t], moving[t] = min(d, s["clip_high"]), d <= s["clip_high"]
        elif advantage < 0:
            bounded[t], moving[t] = max(d, -s["clip_low"]), d >= -s["clip_low"]
        else:
            bounded[t], moving[t] = 0.0, False
        moving[t] = moving[t] and bool(ratio_gradient(new, old))
    n = len(weights)
    row = (
        -sum(float(case.advantages[i, t]) for t in weights)
        / n
        * math.exp(sum(bounded.values()) / n)
    )
    total = sum(weights.values())
    return total * row, {t: total * row / n if moving[t] else 0.0 for t in weights}


def is_ratio_clipped(ratio: float, advantage: float, s: dict) -> bool:
    """Return whether the clipped term of the PPO loss is larger than the unclipped term."""
    clipped = min(max(ratio, 1 - s["clip_low"]), 1 + s["clip_high"])
    return -advantage * clipped > -advantage * ratio


def token_metrics(name: str, case: Case, i: int, t: int, s: dict, selected: bool) -> dict:
    """Return the contribution of one token to each metric, by verl's definitions."""
    new, old, advantage = (float(x[i, t]) for x in (case.log_prob, case.old, case.advantages))
    d = log_ratio(new, old)
    ratio = math.exp(d)
    match name:
        case "vanilla":
            return {
                "ppo_kl": -d,
                "pg_clipfrac": is_ratio_clipped(ratio, advantage, s),
                "pg_clipfrac_lower": advantage < 0 and ratio > s["clip_c"],
            }
        case "gspo":
            row = [
                max(float(case.log_prob[i, u]), -1e4) - float(case.old[i, u])
                for u, m in enumerate(case.mask[i].tolist())
                if m
            ]
            row_ratio = math.exp(min(mean(row), 10))
            clipped = is_ratio_clipped(row_ratio, advantage, s)
            return {"ppo_kl": -d, "pg_clipfrac": clipped, "pg_clipfrac_lower": 0}
        case "sapo":
            return {"ppo_kl": -d, "pg_clipfrac": 0, "pg_clipfrac_lower": 0}
        case "cispo":
            clipped = not 1 - s["clip_low"] <= ratio <= 1 + s["clip_high"]
            return {"ppo_kl": -d, "pg_clipfrac": clipped, "pg_clipfrac_lower": 0}
        case "dppo_tv" | "dppo_kl":
            inside = is_inside_trust_region(new, old, advantage, s, name.removeprefix("dppo_"))
            return {
                "ppo_kl": -d,
                "pg_clipfrac": not inside,
                "pg_clipfrac_lower": inside and ratio > s["clip_c"],
            }
        case "geo_mean":
            outside = d < -s["clip_low"] or d > s["clip_high"]
            return {
                "ppo_kl": -d,
                "pg_clipfrac": outside and advantage > 0,
                "pg_clipfrac_lower": outside and advantage < 0,
                "ratio_clipfrac": (advantage > 0 and d > s["clip_high"])
                or (advantage < 0 and d < -s["clip_low"]),
            }
        case "clip_cov":
            clipped = is_ratio_clipped(ratio, advantage, s)
            return {"ppo_kl": -d, "pg_clipfrac": selected, "ratio_clipfrac": clipped}
        case "kl_cov":
            return {"ppo_kl": abs(d), "ppo_kl_k1": -d}
        case _:
            return {"ppo_kl": -d}


def rule_statistic(case: Case, i: int, name: str, a: Tensor, b: Tensor) -> dict[int, float]:
    """Return the statistic of a rejection rule for each token of a row.

    `a` holds the trainer's log-probs, `b` the rollout's.
    """
    columns = case.mask[i].nonzero().flatten().tolist()
    d = {t: max(float(a[i, t]), -1e4) - max(float(b[i, t]), -1e4) for t in columns}

    def k3(x: float) -> float:
        x = min(max(x, -LIMIT), LIMIT)
        return math.exp(x) - 1 - x

    level, kind = name.rsplit("_", 1)
    one = {"k1": lambda x: -x, "k2": lambda x: x * x / 2, "k3": k3}[kind]
    values = {t: one(x) for t, x in d.items()}
    if level == "seq_sum":
        values = dict.fromkeys(columns, sum(values.values()))
    elif level == "seq_mean" and columns:
        values = dict.fromkeys(columns, sum(values.values()) / len(columns))
    elif level == "seq_max" and columns:
        values = dict.fromkeys(columns, max(values.values()))
    return values


def rule_bounds(name: str, low: float, high: float) -> tuple[float, float]:
    """Return the bounds of the statistic. The user's bounds for k1 = -log w are bounds of w."""
    if name.endswith("k1"):
        return -math.log(high), -math.log(low)
    return -math.inf, high


def rejected(
    case: Case, i: int, name: str, low: float, high: float, a: Tensor, b: Tensor
) -> dict[int, bool]:
    """Return which tokens of a row a rejection rule removes.

    `low` and `high` are the bounds in the user's settings.
    """
    lowest, highest = rule_bounds(name, low, high)
    statistic = rule_statistic(case, i, name, a, b)
    return {t: not lowest <= x <= highest for t, x in statistic.items()}


def rule_metrics(case: Case, rows: list[int], name: str, low: float, high: float) -> dict:
    """Return the metrics of one rejection rule, by verl's definitions."""
    lowest, highest = rule_bounds(name, low, high)
    values = {i: rule_statistic(case, i, name, case.old, case.log_prob) for i in rows}
    tokens = [x for row in values.values() for x in row.values()]
    per_row = [mean(list(row.values())) for row in values.values()]
    units = per_row if name.startswith("seq") else tokens
    out = [{t for t, x in row.items() if not lowest <= x <= highest} for row in values.values()]
    return {
        "mean": mean(tokens),
        "max": max(units),
        "min": min(units),
        "std": deviation([min(max(x, lowest), highest) for x in tokens]),
        "fraction_high": mean([float(x > highest) for x in units]),
        "fraction_low": mean([float(x < lowest) for x in units]),
        "seq_mean": mean(per_row),
        "seq_std": sample_deviation(per_row),
        "seq_max": max(per_row),
        "seq_min": min(per_row),
        "seq_max_deviation": max(abs(x) for x in per_row),
        "seq_fraction_high": mean([float(x > highest) for x in per_row]),
        "seq_fraction_low": mean([float(x < lowest) for x in per_row]),
        "masked_fraction": sum(map(len, out)) / len(tokens),
        "seq_masked_fraction": mean([float(bool(tokens_out)) for tokens_out in out]),
    }


def importance(case: Case, i: int, level: str, a: Tensor, b: Tensor) -> dict[int, float]:
    columns = case.mask[i].nonzero().flatten().tolist()
    d = {t: max(float(a[i, t]), -1e4) - max(float(b[i, t]), -1e4) for t in columns}
    if level == "sequence":
        d = dict.fromkeys(columns, sum(d.values()))
    return {t: math.exp(min(max(x, -LIMIT), LIMIT)) for t, x in d.items()}


def apply_kl(case: Case, ref: Tensor, coef: float, kind: str) -> tuple[np.ndarray, float]:
    """Return rewards minus the penalty, and the mean over rows of the mean KL of a row."""
    out, means = case.rewards.nan_to_num().double().numpy().copy(), []
    for i, mask in enumerate(case.mask.tolist()):
        row = {
            t: kl_token(kind, float(case.old[i, t]), float(ref[i, t]))[0]
            for t, m in enumerate(mask)
            if m
        }
        for t, kl in row.items():
            out[i, t] -= coef * kl
        means += [sum(row.values()) / len(row)] if row else []
    return out, sum(means) / len(means) if means else 0.0


def value_token(value: float, old: float, target: float, clip: float) -> tuple[float, float]:
    """Return the clipped squared error and its derivative with respect to the value."""
    error, clipped = (value - target) ** 2, (min(max(value, old - clip), old + clip) - target) ** 2
    return 0.5 * max(error, clipped), value - target if error >= clipped else 0.0


def mean(x: list[float]) -> float:
    return sum(x) / len(x)


def deviation(x: list[float]) -> float:
    """Return the standard deviation of a population."""
    return math.sqrt(mean([(y - mean(x)) ** 2 for y in x]))


def sample_deviation(x: list[float]) -> float:
    """Return the unbiased standard deviation, or 0 for a single number."""
    if len(x) < 2:
        return 0.0
    return math.sqrt(sum((y - mean(x)) ** 2 for y in x) / (len(x) - 1))


def weight_metrics(
    raw: list[list[float]], applied: list[list[float]], level: str, low: float, high: float
) -> dict[str, float]:
    """Return the metrics of importance weights, by verl's definitions.

    `raw` and `applied` have one list of token weights per row.
    """
    token_raw = [w for row in raw for w in row]
    token_applied = [w for row in applied for w in row]
    row_raw = [mean(row) for row in raw]
    row_applied = [mean(row) for row in applied]
    extremes = row_raw if level == "sequence" else token_applied
    ratios = row_raw if level == "sequence" else token_raw
    return {
        "mean": mean(token_applied),
        "max": max(extremes),
        "min": min(extremes),
        "std": deviation(token_applied),
        "ratio_fraction_high": mean([float(w > high) for w in ratios]),
        "ratio_fraction_low": mean([float(w < low) for w in ratios]),
        "eff_sample_size": mean(token_applied) ** 2
        / max(mean([w * w for w in token_applied]), 1e-12),
        "seq_mean": mean(row_applied),
        "seq_std": sample_deviation(row_applied),
        "seq_max": max(row_applied),
        "seq_min": min(row_applied),
        "seq_max_deviation": max(abs(w - 1) for w in row_applied),
        "seq_fraction_high": mean([float(w > high) for w in row_raw]),
        "seq_fraction_low": mean([float(w < low) for w in row_raw]),
        "raw_mean": mean(token_raw),
        "raw_max": max(token_raw),
        "raw_min": min(token_raw),
        "raw_std": deviation(token_raw),
    }


def limited(x: float) -> float:
    return min(max(x, -LIMIT), LIMIT)


def off_policy(case: Case) -> dict[str, float]:
    """Return the mismatch metrics over rows with tokens.

    The trainer's log-probs are case.old, the rollout engine's are case.log_prob.
    """
    rows = []
    for i, mask in enumerate(case.mask.tolist()):
        tokens = [t for t, m in enumerate(mask) if m]
        if tokens:
            rows.append(
                [
                    (max(float(case.old[i, t]), -1e4), max(float(case.log_prob[i, t]), -1e4))
                    for t in tokens
                ]
            )
    d = [a - b for row in rows for a, b in row]
    trained, sampled = (
        [-mean([a for a, _ in row]) for row in rows],
        [-mean([b for _, b in row]) for row in rows],
    )
    gap = [a - b for a, b in zip(trained, sampled, strict=True)]
    return {
        "kl": mean([-x for x in d]),
        "k3_kl": mean([math.exp(limited(x)) - 1 - limited(x) for x in d]),
        "training_ppl": mean([math.exp(min(x, LIMIT)) for x in trained]),
        "training_log_ppl": mean(trained),
        "rollout_ppl": mean([math.exp(min(x, LIMIT)) for x in sampled]),
        "rollout_log_ppl": mean(sampled),
        "log_ppl_diff": mean(gap),
        "log_ppl_abs_diff": mean([abs(x) for x in gap]),
        "log_ppl_diff_max": max(gap),
        "log_ppl_diff_min": min(gap),
        "ppl_ratio": mean([math.exp(limited(x)) for x in gap]),
        "chi2_token": mean([math.exp(2 * limited(x)) for x in d]) - 1,
        "chi2_seq": mean([math.exp(2 * limited(sum(a - b for a, b in row))) for row in rows]) - 1,
    }


def bounds(threshold: float | str, single_low: float) -> tuple[float, float]:
    """Return (low, high) of a threshold "low_high" or of a single upper bound.

    For a single number, low is single_low / high.
    """
    numbers = [float(x) for x in str(threshold).split("_")]
    return (numbers[0], numbers[1]) if len(numbers) == 2 else (single_low / numbers[0], numbers[0])


def corrected(
    case: Case,
    level: str | None,
    threshold: float | str,
    normalize: bool,
    rules: str | None,
    limits: float | str | None,
) -> tuple[np.ndarray | None, np.ndarray, dict[str, float]]:
    """Return importance weights, the mask after rejection, and all metrics.

    The arguments have the format of the user's settings.
    """
    rows = [i for i, mask in enumerate(case.mask.tolist()) if any(mask)]
    if not rows:
        return zeros(case) if level else None, zeros(case), {}
    metrics, weights = off_policy(case), None
    if level:
        ratios = {i: importance(case, i, level, case.old, case.log_prob) for i in rows}
        truncate = "_" not in str(threshold)
        low, high = bounds(threshold, 1)
        weights = zeros(case)
        for i, row in ratios.items():
            for t, ratio in row.items():
                weights[i, t] = min(ratio, high) if truncate else ratio * (low <= ratio <= high)
        raw = [list(row.values()) for row in ratios.values()]
        used = [[float(weights[i, t]) for t in row] for i, row in ratios.items()]
        found = weight_metrics(raw, used, level, low, high)
        if not truncate:
            outside = [not low <= w <= high for row in raw for w in row]
            found["oob_ratio"] = sum(outside) / len(outside)
        metrics |= {f"rollout_is_{key}": value for key, value in found.items()}
        if normalize:
            if level == "sequence":
                factor = mean([mean(row) for row in used])
            else:
                factor = mean([w for row in used for w in row])
            factor = factor if factor > 1e-8 else 1.0
            weights /= factor
            metrics["rollout_is_batch_norm_factor"] = factor
    left = case.mask.double().numpy().copy()
    if rules:
        names, thresholds = [name.strip() for name in rules.split(",")], str(limits).split(",")
        total = left.sum()
        for name, limit in zip(
            names, thresholds * len(names) if len(thresholds) == 1 else thresholds, strict=False
        ):
            low, high = bounds(limit, 1)
            gone = {
                (i, t)
                for i in rows
                for t, out in rejected(case, i, name, low, high, case.old, case.log_prob).items()
                if out
            }
            for key, value in rule_metrics(case, rows, name, low, high).items():
                metrics[f"rollout_rs_{name}_{key}"] = value
            for place in gone:
                left[place] = 0
        metrics["rollout_rs_masked_fraction"] = 1 - left.sum() / total
        whole = case.mask.double().numpy()
        metrics["rollout_rs_seq_masked_fraction"] = mean(
            [float((left[i] != whole[i]).any()) for i in rows]
        )
        metrics["rollout_rs_seq_fully_masked_fraction"] = mean(
            [float(not left[i].any()) for i in rows]
        )
    return weights, left, {f"rollout_corr/{key}": value for key, value in metrics.items()}
