"""Training workers: metrics over mini-batches, passes, saves that fail."""

import os
from collections import Counter
from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch

from tests.protocol.test_ragged import ROWS, thin
from tests.trainer.test_stages import local_actor
from verlite.algorithms.gap import gap_metrics, gap_totals
from verlite.protocol.data import DataProto
from verlite.spec.roles import Micro, Updates
from verlite.workers import training
from verlite.workers.actor import ActorWorker
from verlite.workers.critic import CriticWorker
from verlite.workers.reference import ReferenceWorker
from verlite.workers.training import StepRows, TrainingWorker, _has_nvml, use_expandable_segments


def worker(engine) -> TrainingWorker:
    made = TrainingWorker.__new__(TrainingWorker)
    made.spec = SimpleNamespace(run_dir="run", temperature=1.0, saves_hf=False)
    made.engine = engine
    made.rank_rows = StepRows()
    made._spec = SimpleNamespace(device_kind="cpu")
    return made


def updated(steps: list[dict[str, float]]) -> dict[str, float]:
    answers = iter(steps)
    engine = SimpleNamespace(
        onload=lambda **_: None,
        offload=lambda: None,
        step_schedule=lambda: None,
        update=lambda *args, **options: next(answers),
    )
    numbers = torch.arange(len(steps))[:, None]
    columns = {"mini_batch_index": numbers, "loss_mask": torch.ones_like(numbers)}
    batch = DataProto.from_dict(columns).with_meta(updates=len(steps), step=3)
    metrics = worker(engine).update_in_mini_batches(
        "actor", batch, Updates(1, len(steps), 1, 1, Micro(1, None), False, "token-mean"), None
    )
    return {key: value for key, value in metrics.items() if "/perf/" not in key}


@pytest.mark.parametrize("dead", [0, 1, None])
def test_a_mini_batch_without_trained_tokens_does_not_change_mean_metrics(dead):
    steps = [
        {"loss": 1.0, "actor/pg_loss": 1.0, "lr": 0.1},
        {"loss": 3.0, "actor/pg_loss": 3.0, "lr": 0.3},
    ]
    if dead is not None:
        steps[dead] = {"lr": steps[dead]["lr"]}
    mean = {0: 3.0, 1: 1.0, None: 2.0}[dead]
    assert updated(steps) == pytest.approx(
        {"actor/loss": mean, "actor/pg_loss": mean, "actor/lr": 0.2}
    )


def test_each_epoch_has_its_mini_batches_and_the_schedule_steps_once():
    calls = []
    engine = SimpleNamespace(
        onload=lambda **_: None,
        offload=lambda: None,
        step_schedule=lambda: calls.append("schedule"),
        update=lambda rows, micro, temperature, loss, **_: (
            calls.append((rows.batch["number"].tolist(), temperature)) or {}
        ),
    )
    batch = DataProto.from_dict(
        {
            "number": torch.arange(4),
            "mini_batch_index": torch.tensor([[0, 1], [0, 0], [1, 0], [1, 1]]),
            "critic_mini_batch_index": torch.zeros(4, 1, dtype=torch.int64),
            "loss_mask": torch.ones(4, 1, dtype=torch.int64),
        }
    ).with_meta(step=1)
    subject = worker(engine)
    subject.spec.temperature = 0.7
    subject.update_in_mini_batches(
        "actor",
        batch.with_meta(updates=2),
        Updates(1, 2, 2, 2, Micro(1, None), True, "token-mean"),
        None,
    )
    assert calls == [([0, 1], 0.7), ([2, 3], 0.7), ([1, 2], 0.7), ([0, 3], 0.7), "schedule"]
    calls.clear()
    subject.update_in_mini_batches(
        "critic",
        batch.with_meta(updates=1),
        Updates(4, 4, 1, 1, Micro(1, None), False, "token-mean"),
        None,
    )
    assert [call[0] for call in calls[:-1]] == [[0, 1, 2, 3]]


@pytest.mark.parametrize(
    ("kind", "method", "expected"),
    [
        (ActorWorker, "log_probs", (0.7, "with adapters")),
        (ActorWorker, "reference_log_probs", (0.7, "without adapters")),
        (ReferenceWorker, "log_probs", (0.7, "with adapters")),
        (CriticWorker, "values", (1.0, "with adapters")),
    ],
)
def test_log_prob_passes_use_the_sampling_temperature(kind, method, expected):
    seen, adapters = [], ["with adapters"]

    def forward(batch, micro, temperature, **measures):
        seen.append((temperature, adapters[-1]))
        return dict.fromkeys(("log_probs", "entropy", "values"), torch.zeros(2, 3))

    @contextmanager
    def without_adapters():
        adapters.append("without adapters")
        yield
        adapters.pop()

    subject = kind.__new__(kind)
    subject.engine = SimpleNamespace(
        onload=lambda **_: None,
        offload=lambda: None,
        forward=forward,
        without_adapters=without_adapters,
    )
    micro = Micro(1, None)
    passes = SimpleNamespace(micro=micro, reference_micro=micro, needs_sum_pi_squared=False)
    subject.spec = SimpleNamespace(log_probs=passes, micro=micro, temperature=0.7)
    subject.rank_rows = StepRows()
    getattr(subject, method)(thin(ROWS).with_meta(step=1))
    assert seen == [expected]


def test_save_returns_io_errors_and_raises_others():
    def full(folder):
        raise OSError(f"cannot write {folder}: no space left")

    def broken(folder):
        raise ZeroDivisionError

    assert worker(SimpleNamespace(save=full)).save("here") == "cannot write here: no space left"
    assert worker(SimpleNamespace(save=lambda folder: None)).save("here") is None
    with pytest.raises(ZeroDivisionError):
        worker(SimpleNamespace(save=broken)).save("here")


def test_a_hugging_face_folder_beside_the_shards_is_written_if_asked_for(monkeypatch):
    written = []
    engine = SimpleNamespace(
        save=lambda folder: written.append(("shards", folder)),
        save_pretrained=lambda folder, tokenizer: written.append((tokenizer, str(folder))),
    )
    monkeypatch.setattr("verlite.workers.actor.load_tokenizer", lambda model: "tokenizer")
    actor = ActorWorker.__new__(ActorWorker)
    actor.__dict__.update(worker(engine).__dict__)
    assert actor.save("here") is None
    assert written == [("shards", "here")]
    actor.spec.saves_hf, actor.spec.engine = True, SimpleNamespace(model="model")
    assert actor.save("here") is None
    assert written[1:] == [("shards", "here"), ("tokenizer", "here/huggingface")]


def test_log_probs_stay_ragged_and_sums_go_to_the_driver():
    """Rows of 3 and 1 tokens. The middle token of the first is tool text."""
    log_probs = torch.tensor([[-0.5, 0.0, -1.0], [-2.25, 0.0, 0.0]])
    out = {
        "log_probs": log_probs,
        "entropy": torch.tensor([[1.0, 0, 2], [4, 0, 0]]),
        "sum_pi_squared": log_probs,
    }
    subject = ActorWorker.__new__(ActorWorker)
    subject.engine = SimpleNamespace(
        onload=lambda **_: None, offload=lambda: None, forward=lambda *args, **_: out
    )
    passes = SimpleNamespace(micro=Micro(1, None), needs_sum_pi_squared=True)
    subject.spec = SimpleNamespace(log_probs=passes, temperature=1.0)
    subject.rank_rows = StepRows()
    out = subject.log_probs(thin(ROWS).with_meta(step=1))
    assert [row.tolist() for row in out.non_tensor_batch["old_log_probs"]] == [
        [-0.5, 0, -1],
        [-2.25],
    ]
    assert (
        set(out.non_tensor_batch)
        == {"old_log_probs", "entropys", "sum_pi_squared"}
        == set(ActorWorker.log_probs.__keep_remote__)
    )
    assert [row.tolist() for row in out.non_tensor_batch["entropys"]] == [[1, 0, 2], [4]]
    assert out.batch["entropy_sums"].tolist() == [3, 4]
    metrics = gap_metrics(gap_totals(out.batch["gap_sums"]))
    assert (
        metrics["training/log_prob_gap"] == pytest.approx(0.75 / 3)
        and metrics["training/log_prob_gap_max"] == 0.5
    )


def test_peak_memory_of_a_device_is_that_of_one_step(monkeypatch):
    """torch keeps the peak since the start, so a later, smaller step would report it again."""
    peak = [3 << 30]
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: peak[0])
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: peak[0])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: peak.__setitem__(0, 1 << 30))
    made = worker(None)
    monkeypatch.setattr(TrainingWorker, "device", torch.device("cuda", 0))
    first, second = made._memory("actor"), made._memory("actor")
    assert first["actor/perf/max_memory_allocated_gb"] == 3
    assert second["actor/perf/max_memory_allocated_gb"] == 1


@pytest.fixture
def allocator_settings(monkeypatch):
    """Return a function that reads the settings of torch's allocators. They start empty, as they
    are after an import that found no variable."""
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"):
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    read, configure = (
        torch._C._accelerator_getAllocatorSettings,
        torch._C._accelerator_setAllocatorSettings,
    )
    before = read()
    configure("")
    monkeypatch.setattr("verlite.workers.training._has_nvml", lambda: True)
    yield read
    configure(before)


@pytest.mark.parametrize("own", [None, "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_a_training_role_selects_its_gpu_and_expandable_segments(
    monkeypatch, allocator_settings, own
):
    """Before its process group starts, and without overriding the user's allocator settings."""
    if own:
        monkeypatch.setenv(own, "max_split_size_mb:64")
    events = []

    def note_device(device):
        events.append((device, allocator_settings()))

    monkeypatch.setattr(torch.cuda, "set_device", note_device)
    monkeypatch.setattr(TrainingWorker, "device", torch.device("cuda", 0))
    monkeypatch.setattr(
        TrainingWorker, "init_distributed", lambda self, timeout_s: events.append(timeout_s)
    )
    monkeypatch.setattr(
        TrainingWorker, "_build_engine", lambda self: SimpleNamespace(offload=lambda: None)
    )
    TrainingWorker(SimpleNamespace(phase_timeout_s=7200.0))
    setting = "" if own else "expandable_segments:True"
    assert events == [(torch.device("cuda", 0), setting), 7200.0]
    assert os.environ.get("PYTORCH_ALLOC_CONF") == (
        "max_split_size_mb:64" if own == "PYTORCH_ALLOC_CONF" else None
    )


def test_without_nvml_segments_keep_a_fixed_size(monkeypatch, allocator_settings, caplog):
    """torch would fail at the first allocation."""
    monkeypatch.setattr("verlite.workers.training._has_nvml", lambda: False)
    use_expandable_segments()
    assert allocator_settings() == "" and "PYTORCH_ALLOC_CONF" not in os.environ
    assert "libnvidia-ml.so.1" in caplog.text


def test_on_amd_segments_grow_without_nvml(monkeypatch, allocator_settings, caplog):
    monkeypatch.setattr("torch.version.hip", "7.1.25424")
    monkeypatch.setattr("verlite.workers.training._has_nvml", lambda: False)
    use_expandable_segments()
    assert allocator_settings() == "expandable_segments:True" and not caplog.text


def test_nvml_is_probed():
    library = SimpleNamespace(nvmlInit_v2=lambda: 0)
    with mock.patch("ctypes.CDLL", return_value=library):
        assert _has_nvml()
        library.nvmlInit_v2 = lambda: 9  # NVML_ERROR_DRIVER_NOT_LOADED
        assert not _has_nvml()
    with mock.patch("ctypes.CDLL", side_effect=OSError("libnvidia-ml.so.1: cannot open")):
        assert not _has_nvml()


def test_an_older_torch_reads_expandable_segments_from_the_environment(
    monkeypatch, allocator_settings
):
    monkeypatch.delattr(torch._C, "_accelerator_setAllocatorSettings")
    use_expandable_segments()
    assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert allocator_settings() == ""


# Rows of a step are fetched and padded once per worker, whatever number of calls use them

LENGTHS = (3, 1)


def floats() -> list[np.ndarray]:
    return [np.full(length, -0.5, dtype=np.float32) for length in LENGTHS]


def a_step(step: int, *columns: str) -> DataProto:
    """Return the two rows of ROWS with these columns, as the driver sends them."""
    batch = thin(ROWS, **{name: floats() for name in columns if name != "loss_mask"})
    if "loss_mask" in columns:
        mask = batch.non_tensor_batch["response_mask"]
        batch = batch.with_non_tensor(loss_mask=mask)
        batch = batch.with_batch(trained_tokens=batch.batch["sampled_tokens"])
    index = torch.zeros(2, 1, dtype=torch.int64)
    batch = batch.with_batch(mini_batch_index=index, critic_mini_batch_index=index)
    return batch.with_meta(step=step, updates=1)


@pytest.fixture
def padded_columns(monkeypatch) -> Counter:
    """Return how often each column was padded."""
    counts: Counter = Counter()
    pad_columns = training.pad_columns

    def counting(batch):
        counts.update(batch.non_tensor_batch.keys())
        return pad_columns(batch)

    monkeypatch.setattr(training, "pad_columns", counting)
    return counts


def with_engine(worker):
    zeros = torch.zeros(2, 3)
    worker.engine = SimpleNamespace(
        onload=lambda **_: None,
        offload=lambda: None,
        step_schedule=lambda: None,
        forward=lambda *_, **__: {"log_probs": zeros, "entropy": zeros, "values": zeros},
        update=lambda *_, **__: {"loss": 1.0},
    )
    micro = Micro(1, None)
    updates = Updates(2, 2, 1, 1, micro, False, "token-mean")
    worker.spec = SimpleNamespace(
        run_dir="run",
        temperature=1.0,
        log_probs=SimpleNamespace(micro=micro, needs_sum_pi_squared=False),
        micro=micro,
        updates=updates,
        loss=SimpleNamespace(entropy_coeff=0.0, use_kl_loss=False),
        calculate_entropy=False,
        loss_scale=1.0,
        cliprange_value=0.5,
    )
    worker.rank_rows = StepRows()
    worker._objective = None  # the engine above does not call it
    worker._spec = SimpleNamespace(device_kind="cpu")
    return worker


def test_an_actor_pads_each_column_once_per_step(padded_columns):
    worker = with_engine(local_actor(None, None))
    for step in (1, 2):
        worker.log_probs(a_step(step, "rollout_log_probs"))
        worker.update(a_step(step, "loss_mask", "rollout_log_probs", "old_log_probs", "advantages"))
        assert set(padded_columns.values()) == {step}
    assert {"prompt_ids", "response_ids", "response_mask", "loss_mask"} < set(padded_columns)


def test_a_critic_pads_each_column_once_per_step(padded_columns):
    worker = with_engine(CriticWorker.__new__(CriticWorker))
    worker.values(a_step(1))
    worker.update(a_step(1, "loss_mask", "values", "returns"))
    assert set(padded_columns.values()) == {1}


def test_a_call_gets_only_the_columns_that_it_names():
    rows = StepRows()
    rows.padded(a_step(1, "old_log_probs"))
    assert "old_log_probs" not in rows.padded(a_step(1)).batch.keys()


def test_rows_of_another_step_are_padded_again():
    rows = StepRows()
    rows.padded(a_step(1))
    other = thin(ROWS[::-1]).with_meta(step=2)
    assert rows.padded(other).batch["responses"].tolist() == [[12, 0, 0], [10, 0, 11]]


def test_other_rows_in_the_same_step_are_an_error():
    rows = StepRows()
    rows.padded(a_step(1))
    with pytest.raises(ValueError, match="these are another row's tokens"):
        rows.padded(thin(ROWS[::-1]).with_meta(step=1))
