"""Whether the reference service has the policy's weights. Whether it answers, and its model has the
right shape, is checked before (`checks.reference_service`)."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from verlite.config.compile import reference_service_spec
from verlite.config.plan import TEACHER
from verlite.config.schema import Config
from verlite.engine.reference_client import (
    ReferenceUnavailable,
    WrongReference,
    log_probs,
)
from verlite.engine.reference_wire import ModelInfo
from verlite.files import replace_file
from verlite.trainer.errors import RunRefused
from verlite.weights import GAP_LIMIT

if TYPE_CHECKING:
    from verlite.weights.probe import Probe

URL = "actor_rollout_ref.ref.url"
RECORD, TEACHER_RECORD = "reference.json", "teacher.json"
"""Files in the run directory: what the service has told of its model at the first start."""


def check_weights(
    config: Config, info: ModelInfo, run_dir: Path, step: int, describe: Callable[..., Any]
) -> None:
    """Check that the service has the weights that the policy starts from, and record them.

    At the start of a run the policy has these weights: fingerprints are compared, and log-probs of
    fixed tokens. A resumed run compares with the record of its first start.

    Args:
        step: 0, or that of the checkpoint that the run resumes from.
        describe: ActorWorker.describe of all ranks.

    Raises:
        RunRefused: the weights, or the numbers that the service computes with them, are others.
    """
    record = run_dir / RECORD
    if step:
        _compare_with_record(URL, info, record, step)
        return
    name, fingerprint, probe = describe(list(info.fingerprints))[0]
    path = config.actor_rollout_ref.model.path
    if name and info.fingerprints[name] != fingerprint:
        raise RunRefused(
            f"{URL}: the service has other weights than actor_rollout_ref.model.path={path}: "
            f"fingerprint {info.fingerprints[name]:08x} in {name}, the policy's is "
            f"{fingerprint:08x}. Start it with --model_path {path}"
        )
    _compare_probe(config, info, probe)
    _write(record, info)


def check_teacher(info: ModelInfo, run_dir: Path, step: int) -> None:
    """Record the weights of the service with the teacher, or compare them with the record of the
    run's first start. Raises RunRefused: they are others.

    step: 0, or that of the checkpoint that the run resumes from.
    """
    record = run_dir / TEACHER_RECORD
    if step:
        _compare_with_record(f"{TEACHER}url", info, record, step)
    else:
        _write(record, info)


def _write(record: Path, info: ModelInfo) -> None:
    replace_file(record, json.dumps({"model": info.model, "fingerprints": info.fingerprints}))


def _compare_with_record(key: str, info: ModelInfo, record: Path, step: int) -> None:
    try:
        first = dict(json.loads(record.read_text(encoding="utf-8"))["fingerprints"])
    except (OSError, ValueError, KeyError, TypeError):
        raise RunRefused(
            f"{key}: {record} is missing or damaged, so it is not known which model "
            f"the {step} steps of this run had. A run that began without the service continues "
            "without it"
        ) from None
    common = first.keys() & info.fingerprints.keys()
    if not common or any(first[name] != info.fingerprints[name] for name in common):
        raise RunRefused(
            f"{key}: the service's model {info.name} ({info.model}) is not the one that this run "
            f"began with ({record}). Start it with the same --model_path and --model_dtype"
        )


def _compare_probe(config: Config, info: ModelInfo, probe: "Probe") -> None:
    """Compare log-probs of fixed tokens: equal weights with other settings give others."""
    from verlite.weights.probe import gap, probe_limit

    ids = np.array(probe.ids, dtype=np.int32)
    try:
        service = reference_service_spec(config)
        found = log_probs(service, [ids], [len(ids) - 1], 1.0, info.model)[0]
    except (ReferenceUnavailable, WrongReference) as error:
        raise RunRefused(str(error)) from error
    limit = probe_limit(GAP_LIMIT, info.dtype)
    difference = gap(probe, found.tolist())
    if not difference.is_within(limit):
        raise RunRefused(
            f"{URL}: the service computes other log-probs than the policy before its first update: "
            f"over {len(found)} tokens the difference is {difference}. Are "
            "actor_rollout_ref.model.override_config or the versions of transformers different?"
        )
