"""Settings of rollout correction, and its named presets.

`verlite.algorithms.rollout_correction` implements them.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

REJECTIONS = tuple(
    f"{unit}_{kind}"
    for unit in ("token", "seq_sum", "seq_mean", "seq_max")
    for kind in ("k1", "k2", "k3")
    if (unit, kind) != ("seq_max", "k1")
)


@dataclass(frozen=True)
class RolloutCorrection:
    """Settings, with verl's names. w is the ratio of trainer and rollout probabilities.

    Raises:
        ValueError: a setting is invalid. The message is "key=value: rule".
    """

    rollout_is: str | None = None
    """Weights of the loss: None, "token" (each token's w) or "sequence" (the product of w over the
    row, on each of its tokens).
    """
    rollout_is_threshold: float | str = 2.0
    """C truncates weights to at most C (TIS). "low_high" sets weights outside the band to 0
    (IcePop).
    """
    rollout_is_batch_normalize: bool = False
    """Divide the weights by their mean."""
    rollout_rs: str | None = None
    """Rejections from REJECTIONS, separated by commas. A row or token must pass all of them.

    A name is <token | seq_sum | seq_mean | seq_max>_<k1 | k2 | k3> with k1 = -log w,
    k2 = (log w)^2 / 2 and k3 = w - 1 - log w.
    """
    rollout_rs_threshold: float | str | None = None
    """One threshold per rejection, or one for all.

    For k1 a band "low_high" of the ratio, which is exp of the summed or mean log w; a single u
    means 1/u to u. For k2 and k3 an upper bound.
    """
    bypass_mode: bool = False
    """Use the rollout's log-probs as old log-probs, without a forward pass, and the policy loss
    bypass_mode.
    """
    loss_type: str = "ppo_clip"
    """In bypass mode: ppo_clip (its ratio is the correction) or reinforce (-A log pi, weighted)."""

    def __post_init__(self) -> None:
        if self.rollout_is not in (None, "token", "sequence"):
            raise ValueError(f"rollout_is={self.rollout_is}: choose token, sequence or null")
        if self.loss_type not in ("ppo_clip", "reinforce"):
            raise ValueError(f"loss_type={self.loss_type}: choose ppo_clip or reinforce")
        if self.bypass_mode and self.rollout_is_batch_normalize:
            raise ValueError(
                "rollout_is_batch_normalize=true: needs all weights at once, which bypass_mode "
                "never has; turn one of them off"
            )
        _ = self.is_band, self.rejections

    @property
    def acts_on_batch(self) -> bool:
        """Whether weights or rejections are computed before the update, from the trainer's old
        log-probs.
        """
        return not self.bypass_mode and bool(self.rollout_is or self.rollout_rs)

    @cached_property
    def is_band(self) -> tuple[float, float]:
        """Lower and upper bound of the weights; 0 and C for truncation."""
        return _band("rollout_is_threshold", self.rollout_is_threshold, lambda high: 0.0)

    @property
    def is_truncated(self) -> bool:
        """Whether weights above the band become its upper bound (TIS).

        Otherwise weights outside it become 0 (IcePop).
        """
        return "_" not in str(self.rollout_is_threshold)

    @cached_property
    def rejections(self) -> list[tuple[str, float, float]]:
        """(name, low, high): keep while low <= statistic <= high; for k1 the statistic is the log
        of the ratio.
        """
        if not self.rollout_rs:
            return []
        names = [name.strip() for name in self.rollout_rs.split(",")]
        if self.rollout_rs_threshold is None:
            raise ValueError(
                f"rollout_rs={self.rollout_rs}: needs rollout_rs_threshold, such as 0.5_2.0 for k1 "
                "or 0.01 for k3"
            )
        thresholds = [part.strip() for part in str(self.rollout_rs_threshold).split(",")]
        if len(thresholds) == 1:
            thresholds *= len(names)
        if len(thresholds) != len(names):
            raise ValueError(
                f"rollout_rs_threshold={self.rollout_rs_threshold}: {len(thresholds)} for the "
                f"{len(names)} entries of rollout_rs; give one "
                "each, or one for all"
            )
        rules = []
        for name, threshold in zip(names, thresholds, strict=True):
            if name not in REJECTIONS:
                raise ValueError(f"rollout_rs={name}: choose from {', '.join(REJECTIONS)}")
            if name.endswith("k1"):
                low, high = _band("rollout_rs_threshold", threshold, lambda high: 1 / high)
                if low <= 0:
                    raise ValueError(
                        f"rollout_rs_threshold={threshold}: the lower bound of a ratio must be "
                        "above 0"
                    )
                rules.append((name, math.log(low), math.log(high)))
            elif "_" in threshold:
                raise ValueError(
                    f"rollout_rs_threshold={threshold}: {name} has an upper bound only"
                )
            else:
                rules.append(
                    (name, -math.inf, _band("rollout_rs_threshold", threshold, lambda high: 0.0)[1])
                )
        return rules


def _band(
    key: str, value: float | str, default_low: Callable[[float], float]
) -> tuple[float, float]:
    """Return a band, written as "low_high" or as a single upper bound, as two numbers."""
    try:
        numbers = [float(part) for part in str(value).split("_")]
    except ValueError:
        numbers = []
    if len(numbers) == 1 and numbers[0] > 0:
        numbers = [default_low(numbers[0]), numbers[0]]
    if len(numbers) != 2 or not 0 <= numbers[0] < numbers[1]:
        raise ValueError(
            f"{key}={value}: write one positive number, or two as low_high with low below high "
            "(0.5_2.0)"
        )
    return numbers[0], numbers[1]


_GEO: Any = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.999_1.001"}
_K3: Any = {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.01}
_REINFORCE: Any = {"bypass_mode": True, "loss_type": "reinforce"}
PRESETS: dict[str, RolloutCorrection] = {
    "disabled": RolloutCorrection(),
    "decoupled_token_is": RolloutCorrection("token", 2.0),
    "decoupled_seq_is": RolloutCorrection("sequence", 2.0),
    "decoupled_seq_is_rs": RolloutCorrection(
        "sequence", 2.0, rollout_rs="seq_sum_k1", rollout_rs_threshold="0.5_2.0"
    ),
    "decoupled_geo_rs": RolloutCorrection(**_GEO),
    "decoupled_geo_rs_token_tis": RolloutCorrection("token", 2.0, **_GEO),
    "decoupled_k3_rs": RolloutCorrection(**_K3),
    "decoupled_k3_rs_token_tis": RolloutCorrection("token", 2.0, **_K3),
    "decoupled_geo_rs_seq_tis": RolloutCorrection("sequence", 2.0, **_GEO),
    "decoupled_k3_rs_seq_tis": RolloutCorrection("sequence", 2.0, **_K3),
    "decoupled_token_icepop": RolloutCorrection("token", "0.5_5.0"),
    "icepop": RolloutCorrection("token", "0.5_5.0"),
    "bypass_ppo_clip": RolloutCorrection(bypass_mode=True),
    "bypass_ppo_clip_geo_rs": RolloutCorrection(bypass_mode=True, **_GEO),
    "bypass_ppo_clip_k3_rs": RolloutCorrection(bypass_mode=True, **_K3),
    "bypass_pg_is": RolloutCorrection("sequence", 2.0, **_REINFORCE),
    "bypass_pg_geo_rs": RolloutCorrection(**_REINFORCE, **_GEO),
    "bypass_pg_geo_rs_token_tis": RolloutCorrection("token", 2.0, **_REINFORCE, **_GEO),
    "bypass_pg_geo_rs_seq_tis": RolloutCorrection("sequence", 2.0, **_REINFORCE, **_GEO),
    "bypass_pg_token_icepop": RolloutCorrection("token", "0.5_5.0", **_REINFORCE),
}


def settings(config: Any) -> RolloutCorrection:
    """Return the settings of a section algorithm.rollout_correction, with its preset expanded.

    Raises:
        ValueError: "key=value: what is wrong with it".
    """
    if config.preset is not None:
        return PRESETS[config.preset]
    return RolloutCorrection(
        rollout_is=config.rollout_is,
        rollout_is_threshold=config.rollout_is_threshold,
        rollout_is_batch_normalize=config.rollout_is_batch_normalize,
        rollout_rs=_joined(config.rollout_rs),
        rollout_rs_threshold=_joined(config.rollout_rs_threshold),
        bypass_mode=config.bypass_mode,
        loss_type=config.loss_type,
    )


def _joined(value: Any) -> Any:
    """Return a list as text with commas; other values unchanged."""
    return ",".join(map(str, value)) if isinstance(value, list) else value
