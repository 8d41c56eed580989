"""What a step costs on GPUs, from their data sheets and the model's config.json: a roofline.

Nothing here is measured. The shares of the peaks that are reached are assumptions; `ASSUMED` says
them in words.
"""

from verlite.config.plan import Plan
from verlite.config.schema import Config
from verlite.sizing.devices import Devices, DevicesError
from verlite.sizing.facts import DTYPE_BYTES
from verlite.sizing.simulation import Costs
from verlite.sizing.sync import sync_bytes
from verlite.sizing.tables import RunModels, step_flops
from verlite.sizing.workload import Drawn

PEAKS = {
    "V100-16GB": (125, 900),
    "V100-32GB": (125, 900),
    "T4": (65, 320),
    "A10": (125, 600),
    "A10G": (70, 600),
    "L4": (121, 300),
    "A6000": (155, 768),
    "L40": (181, 864),
    "L40S": (362, 864),
    "RTX3090": (71, 936),
    "RTX4090": (165, 1008),
    "RTX5090": (210, 1792),
    "A100-40GB": (312, 1555),
    "A100-80GB": (312, 2039),
    "A800-80GB": (312, 2039),
    "H100-80GB": (989, 3350),
    "H800-80GB": (989, 3350),
    "H20-96GB": (148, 4000),
    "H200-141GB": (989, 4800),
    "B200-180GB": (2250, 8000),
    "MI210-64GB": (181, 1638),
    "MI300X-192GB": (1307, 5300),
}
"""Peak TFLOP/s of dense matrix products in 16 bits, and GB/s of memory, of the SXM variants."""

TRAINED = 0.35
"""Share of the peak FLOP/s that training passes reach."""
PREFILLED = 0.5
"""Share that prefill reaches."""
READ = 0.7
"""Share of the memory's bandwidth that decoding reaches."""
STEP_S = 0.004
"""Of each decode step: scheduling, sampling, launches."""
SYNCED = 10e9
"""Bytes per second of a weight sync, of the whole weights."""
ASSUMED = (
    f"roofline: training passes reach {TRAINED:.0%} of the peak FLOP/s, prefill {PREFILLED:.0%}, "
    f"decoding {READ:.0%} of the memory's bandwidth and {1000 * STEP_S:g} ms more for each of its "
    f"steps; a weight sync moves {SYNCED / 1e9:g} GB/s and takes a second more. Nothing of it was "
    "measured"
)


def roofline_costs(
    config: Config, plan: Plan, devices: Devices, models: RunModels, drawn: Drawn
) -> Costs:
    """Return the costs of a run with these samples.

    A decode step reads the weights, and the keys and values of each sample that runs.

    Raises:
        DevicesError: the table has no peak of these devices.
    """
    if devices.name not in PEAKS:
        raise DevicesError(
            f"the costs of {devices.name} are not known. Name GPUs of the table, as in --devices "
            "8xH100-80GB, give the directory of a run, or --decode-step-s and --update-token-s"
        )
    tera, giga = PEAKS[devices.name]
    flops, bandwidth = tera * 1e12, giga * 1e9 * READ
    engine = plan.tensor_parallel
    policy, dtype = models.policy, plan.rollout_dtype
    length = round(drawn.mean_tokens())
    forward = policy.forward_flops(length)
    weights = policy.exported * DTYPE_BYTES[dtype]
    keys = policy.kv_bytes(dtype) * drawn.mean_context()
    passes = step_flops(config, plan, models, length)
    trained = (sum(passes.values()) - passes["generation"]) / (plan.batch_size * length)
    return Costs(
        decode_step_s=STEP_S + weights / (engine * bandwidth),
        decode_sample_s=keys / (engine * bandwidth) + forward / (engine * flops * PREFILLED),
        prefill_token_s=forward / (engine * flops * PREFILLED),
        update_token_s=trained / (flops * TRAINED),
        sync_s=1.0 + sync_bytes(plan, policy).whole / SYNCED,
    )
