"""TrainEngine: one model, sharded over all ranks with FSDP2, that computes log-probs or values and takes optimizer steps.

Knows no RL algorithm: the loss is a function that the caller gives. torch.distributed must be initialised.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from verlite.config.schema import FSDPConfig, ModelConfig, OptimConfig
from verlite.engine import checkpoint, export, lora, ulysses
from verlite.engine.folder import ModelError, load_config
from verlite.engine.layers import checkpoint_layers, compile_layer
from verlite.engine.micro import MicroBatching, ModelInputs, dummy_inputs, model_inputs
from verlite.engine.model import HeadedModel, load_model, load_skeleton, value_head
from verlite.engine.optim import build_adamw, clip_gradients, learning_rate
from verlite.protocol.data import DataProto
from verlite.protocol.weights import combine, fingerprint

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Counts:
    """Over all rows of all ranks of one optimizer step: trainable tokens, and rows that have at least one."""

    tokens: int
    sequences: int


LossFn = Callable[[TensorDict, dict[str, Tensor], Counts], tuple[Tensor, dict[str, Tensor]]]
"""(rows of a micro-batch, the model's outputs [b, R], counts) -> (loss, metrics). Loss and metrics are sums that add up over
micro-batches and ranks to those of the step; of metrics whose name ends in _max the largest is taken."""


class NonFiniteError(RuntimeError):
    """Loss, gradients or weights are NaN or infinite."""


class TrainEngine:
    """See the module's docstring.

    head: "lm" for log-probs, "value" for values. optim=None: a frozen model, for forward passes only.
    total_training_steps: needed by schedules that end. device: this rank's; None: cuda where there is one.
    sequence_parallel: neighbouring ranks that run their rows together, each a part of every sequence (engine.ulysses).
    """

    def __init__(
        self,
        model: ModelConfig,
        fsdp: FSDPConfig,
        optim: OptimConfig | None = None,
        *,
        head: str = "lm",
        total_training_steps: int | None = None,
        grad_clip: float = 1.0,
        max_nonfinite_updates: int = 3,
        device: torch.device | str | None = None,
        seed: int = 0,
        sequence_parallel: int = 1,
    ):
        torch.manual_seed(seed)
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.sequence_group = ulysses.neighbours(sequence_parallel, model.use_remove_padding)
        self.model_config, self.fsdp_config, self.optim_config = model, fsdp, optim
        self.total_training_steps, self.grad_clip, self.max_nonfinite_updates = (
            total_training_steps,
            grad_clip,
            max_nonfinite_updates,
        )
        hf_model = self._load(head)
        if optim is not None and model.enable_gradient_checkpointing:
            checkpoint_layers(
                hf_model, offload=model.enable_activation_offload and self.device.type == "cuda"
            )
        self.model = HeadedModel(hf_model, head)
        self.model.requires_grad_(False)
        for _, parameter in lora.trained(hf_model):
            parameter.requires_grad_(optim is not None)
        self._shard()
        self._require_finite(f"refusing model.path={model.path}")
        self._self_check()
        self.parameters = [parameter for _, parameter in lora.trained(hf_model)]
        self.optimizer = None if optim is None else build_adamw(self.parameters, optim)
        self.schedule_step = 0
        self._updated = False  # since the last step of the schedule
        self._nonfinite_in_a_row = 0
        self._set_learning_rate()

    def _load(self, kind: str) -> PreTrainedModel:
        """The whole model on rank 0, which alone reads the checkpoint. The others have its modules, and get the weights in _shard."""
        dtype = _dtype("model_dtype", self.fsdp_config.model_dtype)
        shared: list[Any] = [None, None]
        if self.rank == 0:
            try:
                hf_model = load_model(self.model_config, kind, dtype)
                lora.add(hf_model, self.model_config)
                shared = [None, (_layout(hf_model), getattr(hf_model, "_weight_conversions", None))]
            except ModelError as error:
                shared = [str(error), None]
        if self.world_size > 1:
            dist.broadcast_object_list(shared)
        if shared[0] is not None:
            raise ModelError(shared[0])
        if self.rank > 0:
            hf_model = load_skeleton(self.model_config, kind)
            lora.add(hf_model, self.model_config, read_weights=False)
            layout, hf_model._weight_conversions = shared[1]
            for name, tensor in [*hf_model.named_parameters(), *hf_model.named_buffers()]:
                tensor.data = tensor.data.to(layout[name][1])
            if _layout(hf_model) != layout:
                raise ModelError(
                    f"model.path={self.model_config.path} is another model on rank {self.rank} than on rank 0"
                )
        return hf_model

    def _receive(self, tensors: Iterable[Tensor]) -> None:
        """Put rank 0's values into whole tensors, on each rank's device. Tied tensors stay tied: their identity is kept."""
        for tensor in tensors if self.world_size > 1 else ():
            whole = (
                tensor.detach().to(self.device)
                if self.rank == 0
                else torch.empty_like(tensor, device=self.device)
            )
            dist.broadcast(whole, 0)
            # Both are new tensors over the storage of `whole`, which the communication backend may still refer to.
            fresh = (
                nn.Parameter(whole, tensor.requires_grad)
                if isinstance(tensor, nn.Parameter)
                else whole.detach()
            )
            torch.utils.swap_tensors(tensor, fresh)

    def _shard(self) -> None:
        compute = self.fsdp_config.dtype
        compute = _dtype(
            "dtype",
            ("bfloat16" if self.device.type == "cuda" else "float32")
            if compute == "auto"
            else compute,
        )
        if compute == torch.float16 and self.optim_config is not None:
            raise ValueError(
                "fsdp_config.dtype=float16 needs loss scaling, which is not built in; use bfloat16"
            )
        size, world = self.fsdp_config.fsdp_size, self.world_size
        if size in (-1, world):
            mesh = init_device_mesh(self.device.type, (world,))
        elif size > 0 and world % size == 0:
            mesh = init_device_mesh(
                self.device.type, (world // size, size), mesh_dim_names=("replicate", "shard")
            )
        else:
            raise ValueError(
                f"fsdp_config.fsdp_size={size} must divide the {world} devices of this role, or be -1 for all"
            )
        self.mesh = mesh
        policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
        options: dict[str, Any] = {
            "mesh": mesh,
            "reshard_after_forward": self.fsdp_config.reshard_after_forward,
        }
        hf_model = self.model.model
        for module in list(hf_model.modules()):
            if type(module).__name__ in (hf_model._no_split_modules or ()):
                self._receive(module.parameters())
                if self.fsdp_config.use_torch_compile:
                    compile_layer(module)
                fully_shard(module, mp_policy=policy, **options)
        self._receive(p for p in hf_model.parameters() if not isinstance(p, DTensor))
        self._receive(hf_model.buffers())
        if self.model.kind == "value":
            fully_shard(
                value_head(hf_model)[1],
                mp_policy=MixedPrecisionPolicy(torch.float32, torch.float32),
                **options,
            )
        # The root holds the embeddings and the output head: needed first and last, so gathered from forward to backward.
        fully_shard(self.model, mp_policy=policy, **(options | {"reshard_after_forward": False}))

    def _self_check(self) -> None:
        register_fsdp_forward_method(self.model, "self_check")
        self.model.eval()
        self.model.self_check(self.device, self.sequence_group)
        self._reshard()

    # ---- passes

    @torch.no_grad()
    def forward(
        self,
        batch: DataProto,
        micro: MicroBatching,
        temperature: float = 1.0,
        with_entropy: bool = False,
        with_sum_pi_squared: bool = False,
    ) -> dict[str, Tensor]:
        """{"log_probs" and, if asked for, "entropy" and "sum_pi_squared"} or {"values"}: [b, R] float32 on the CPU, rows in their
        order, 0 where response_mask is 0. All ranks must call it, each with its own rows, of which there may be none."""
        own = _rows(batch)
        rows, mine = self._shared(own)
        self.model.eval()
        parts = micro.split(rows)
        out: dict[str, Tensor] = {}
        for i in range(self._sum_and_max([], len(parts))[1]):
            part = parts[i] if i < len(parts) else None
            inputs, _ = self._inputs(rows, part)
            result = self.model(inputs, temperature, with_entropy, with_sum_pi_squared)
            if part is not None:
                for name, values in result.items():
                    out.setdefault(name, torch.zeros(rows["response_mask"].shape))[part] = (
                        inputs.spread(values).cpu()
                    )
        self._reshard()
        asked = {"log_probs": True, "entropy": with_entropy, "sum_pi_squared": with_sum_pi_squared}
        names = (
            ["values"]
            if self.model.kind == "value"
            else [name for name, wanted in asked.items() if wanted]
        )
        width = own["response_mask"].shape[1]
        return {
            name: out.get(name, torch.zeros(rows["response_mask"].shape))[mine, :width]
            for name in names
        }

    @contextmanager
    def without_adapters(self) -> Iterator[None]:
        """Forward passes in it are those of the model that LoRA started from: the reference."""
        with lora.disabled(self.model):
            yield

    def update(
        self,
        batch: DataProto,
        micro: MicroBatching,
        temperature: float,
        loss_fn: LossFn,
        with_entropy: bool = False,
        dump_dir: Path | None = None,
    ) -> dict[str, float]:
        """One optimizer step over all rows of all ranks. All ranks must call it, each with its own rows (maybe none).

        Returns the sums of loss_fn's metrics, and loss, grad_norm (before clipping), lr, nonfinite (1: the update was dropped),
        equal on all ranks. When loss or gradient norm is not finite on any rank, parameters and optimizer stay as they were
        on all of them and each rank's rows are saved below dump_dir. Raises NonFiniteError after max_nonfinite_updates such
        updates in a row. A step without any trainable token changes nothing.
        """
        if self.optimizer is None:
            raise RuntimeError(
                "this engine was built without an optimizer; it can only run forward passes"
            )
        mine = _rows(batch)
        self.model.train()
        mask = mine["response_mask"]
        rows, _ = self._shared(mine)
        parts = micro.split(rows)
        (tokens, sequences), passes = self._sum_and_max(
            [int(mask.sum()), int(mask.any(-1).sum())], len(parts)
        )
        counts = Counts(tokens, sequences)
        sums: dict[str, Tensor] = {}
        for i in range(passes):
            # Keeping gradients whole until the last pass saves communication and costs memory, like keeping parameters whole.
            self.model.set_requires_gradient_sync(
                self.fsdp_config.reshard_after_forward or i == passes - 1
            )
            part = parts[i] if i < len(parts) else None
            inputs, micro_rows = self._inputs(rows, part)
            outputs = self.model(inputs, temperature, with_entropy)
            if micro_rows is None:
                sum(values.sum() for values in outputs.values()).mul(0).backward()
                continue
            loss, metrics = loss_fn(
                micro_rows,
                {name: inputs.spread(values) for name, values in outputs.items()},
                counts,
            )
            (
                loss * self.world_size
            ).backward()  # FSDP averages over ranks; the loss is a sum over them
            if self.sequence_group is not None and self.sequence_group.rank():
                continue  # the first of the ranks that share rows counts them
            for name, value in ({"loss": loss} | metrics).items():
                sums[name] = (
                    _both(name, sums[name], value.detach()) if name in sums else value.detach()
                )
        metrics = self._sum_metrics(sums)
        norm = float(clip_gradients(self.parameters, self.grad_clip))
        finite = math.isfinite(norm) and math.isfinite(metrics.get("loss", 0.0))
        lr = self.optimizer.param_groups[0]["lr"]
        if finite and passes:
            self.optimizer.step()
            self._updated = True
        self.optimizer.zero_grad(set_to_none=True)
        self._guard(finite, batch, dump_dir)
        return metrics | {"grad_norm": norm, "lr": lr, "nonfinite": float(not finite)}

    def _inputs(
        self, rows: TensorDict, part: Tensor | None
    ) -> tuple[ModelInputs, TensorDict | None]:
        packed = self.model_config.use_remove_padding
        if part is None:
            return dummy_inputs(packed).cut(self.sequence_group).to(self.device), None
        micro_rows = rows[part]
        return model_inputs(micro_rows, packed).cut(self.sequence_group).to(
            self.device
        ), micro_rows.to(self.device)

    def _shared(self, rows: TensorDict) -> tuple[TensorDict, slice]:
        """The rows that this rank runs, and which of them are its own: with sequence parallelism, those of its whole group."""
        return (
            (rows, slice(None))
            if self.sequence_group is None
            else ulysses.together(rows, self.sequence_group)
        )

    def _guard(self, finite: bool, batch: DataProto, dump_dir: Path | None) -> None:
        if finite:
            self._nonfinite_in_a_row = 0
            return
        self._nonfinite_in_a_row += 1
        where = "its batch was not saved"
        if dump_dir is not None:
            folder = Path(dump_dir) / f"rank_{self.rank}"
            batch.save_to_disk(folder)
            where = f"its batch is in {folder.parent}"
        if self._nonfinite_in_a_row >= self.max_nonfinite_updates:
            raise NonFiniteError(
                f"{self._nonfinite_in_a_row} updates in a row had a loss or gradient that is not finite and were dropped (training step "
                f"{self.schedule_step + 1} of this model; {where}). Look at the batch, lower optim.lr, or raise max_nonfinite_updates"
            )

    def _sum_and_max(self, numbers: list[int], largest: int) -> tuple[list[int], int]:
        """Over ranks: the sums of `numbers`, and the maximum of `largest`."""
        if self.world_size == 1:
            return numbers, largest
        table = torch.zeros(
            self.world_size, len(numbers) + 1, dtype=torch.int64, device=self.device
        )
        table[self.rank] = torch.tensor([*numbers, largest])
        dist.all_reduce(table)
        return table[:, :-1].sum(0).tolist(), int(table[:, -1].max())

    def _sum_metrics(self, sums: dict[str, Tensor]) -> dict[str, float]:
        """Sums (or maxima) over ranks, which need not have the same names: a rank without rows has none."""
        values = torch.stack([v.double() for v in sums.values()]).tolist() if sums else []
        mine = dict(zip(sums, values, strict=True))
        every: list[Any] = [mine]
        if self.world_size > 1:
            every = [None] * self.world_size
            dist.all_gather_object(every, mine)
        names = dict.fromkeys(name for one in every for name in one)
        return {
            name: (max if name.endswith("_max") else math.fsum)(
                one[name] for one in every if name in one
            )
            for name in names
        }

    def _reshard(self) -> None:
        """Free parameters that forward passes left gathered; stale copies would otherwise survive a load."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    # ---- schedule

    def step_schedule(self) -> float:
        """Once per training step, after its updates: set the next learning rate and return it.

        The schedule counts training steps in which at least one update was applied.
        """
        if self._updated:
            self.schedule_step += 1
            self._updated = False
            self._set_learning_rate()
        return self.optimizer.param_groups[0]["lr"] if self.optimizer else 0.0

    def _set_learning_rate(self) -> None:
        if self.optimizer is not None and self.optim_config is not None:
            self.optimizer.param_groups[0]["lr"] = learning_rate(
                self.optim_config, self.schedule_step, self.total_training_steps
            )

    # ---- weights out, state to and from disk

    def export(
        self, dtype: torch.dtype | None = None, snapshot: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, whole tensor on the CPU) for each weight, one layer in memory at a time; tied weights once.

        All ranks must iterate to the end. Works while parameters are offloaded. snapshot=False, for who copies each weight at once: a
        tensor may be the model's own.
        """
        return export.full_weights(self.model.model, dtype, self.device, snapshot)

    def save_pretrained(
        self,
        folder: Path | str,
        tokenizer: PreTrainedTokenizerBase | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Write a Hugging Face folder (rank 0 writes, all ranks must call). The value model becomes a token classification model.

        With LoRA the weights are merged, and lora_adapter/ has a policy's adapter alone, as peft reads it.
        """
        config = load_config(self.model_config)
        if self.model.kind == "value":
            config.num_labels = 1
        export.save_pretrained(
            Path(folder),
            self.export(dtype),
            self.model.model,
            config,
            tokenizer,
            write=self.rank == 0,
        )
        if self.model.kind == "lm" and lora.layers(self.model):
            lora.save(
                Path(folder) / lora.FOLDER,
                self.model.model,
                self.model_config.path,
                self.device,
                write=self.rank == 0,
            )
        dist.barrier()

    def fingerprint(self, dtype: torch.dtype | None = None) -> int:
        """protocol.weights.fingerprint of the weights in `dtype`, over all shards: equal to that of what export(dtype) yields."""
        return self._fingerprint(export.named_weights(self.model.model, dtype, self.device), dtype)

    def _fingerprint(self, named: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None) -> int:
        replica = self.mesh.get_local_rank(0) if self.mesh.ndim == 2 else 0
        whose = (
            (name, tensor, replica if isinstance(tensor, DTensor) else self.rank)
            for name, tensor in named
        )
        mine = (
            (name, checkpoint.local_part(tensor)) for name, tensor, copy in whose if copy == 0
        )  # of copies, one counts
        return combine(*self._sum_and_max([fingerprint(mine, dtype)], 0)[0])

    def save(self, folder: Path | str) -> None:
        """Write parameters, optimizer, schedule and generators (engine.checkpoint says how). All ranks must call it.

        Raises NonFiniteError, before anything is written, when a weight is NaN or infinite.
        """
        self._require_finite("refusing to save")
        schedule = {
            "step": self.schedule_step,
            "updated": self._updated,
            "nonfinite_in_a_row": self._nonfinite_in_a_row,
        }
        schedule["frozen"] = self._fingerprint(lora.frozen(self.model.model), None)
        checkpoint.save(Path(folder), self.model.model, self.optimizer, schedule)

    def load(self, folder: Path | str) -> None:
        """Continue from what `save` wrote with any number of ranks: exactly, with the same number. All ranks must call it.

        Raises ValueError when the folder is incomplete or of another model, NonFiniteError when its weights are not finite;
        the engine must not be used after either.
        """
        schedule = checkpoint.load(Path(folder), self.model.model, self.optimizer)
        self._require_finite(f"refusing the checkpoint {folder}")
        if schedule.get("frozen", 0) != self._fingerprint(lora.frozen(self.model.model), None):
            raise ValueError(
                f"the checkpoint {folder} has adapters to another model than model.path={self.model_config.path}"
            )
        self.schedule_step, self._updated = schedule["step"], schedule["updated"]
        self._nonfinite_in_a_row = schedule["nonfinite_in_a_row"]
        self._set_learning_rate()

    def _require_finite(self, doing: str) -> None:
        if bad := checkpoint.nonfinite(self.model.model):
            raise NonFiniteError(
                f"{doing}: {len(bad)} weights are NaN or infinite, the first is {bad[0]}"
            )

    # ---- memory

    def onload(self, parameters: bool = True, optimizer: bool = False) -> None:
        """Bring parameters and/or optimizer state to the device, where they are not there already."""
        if parameters:
            self._move_parameters(self.device)
        if optimizer:
            self._move_optimizer(self.device)

    def offload(self) -> None:
        """Move to host memory what fsdp_config.param_offload and optimizer_offload name, and free it on the device.

        No pass leaves gathered parameters or gradients, so that nothing else of the model is there then.
        """
        if self.fsdp_config.param_offload:
            self._move_parameters(torch.device("cpu"))
        if self.fsdp_config.optimizer_offload:
            self._move_optimizer(torch.device("cpu"))
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _move_parameters(self, device: torch.device) -> None:
        if self.parameters[0].device.type != device.type:
            self.model.to(device)

    def _move_optimizer(self, device: torch.device) -> None:
        for state in self.optimizer.state.values() if self.optimizer else ():
            for name, tensor in state.items():
                state[name] = tensor.to(device, non_blocking=True)
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def _both(name: str, a: Tensor, b: Tensor) -> Tensor:
    """A metric over two micro-batches; see LossFn."""
    return torch.maximum(a, b) if name.endswith("_max") else a + b


def _layout(model: nn.Module) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {
        name: (tensor.shape, tensor.dtype)
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]
    }


def _dtype(key: str, name: str) -> torch.dtype:
    if name not in _DTYPES:
        raise ValueError(f"fsdp_config.{key}={name!r}: choose one of {', '.join(_DTYPES)}")
    return _DTYPES[name]


def _rows(batch: DataProto) -> TensorDict:
    if batch.batch is None:
        raise ValueError("the batch has no tensors")
    return batch.batch
