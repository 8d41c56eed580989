"""vLLM's engine for GPUs, computed on the CPU: its kernels in Triton by Triton's interpreter, which
TRITON_INTERPRET=1 chooses, and torch's operators instead of those that vLLM has in C++."""

import os
import sys
from types import ModuleType
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map

from tests.gpu_dry import cpu_kernels


def _in_place(executor: Any, args: Any, kwargs: Any) -> Any:
    """Let a kernel read and write the simulated memory, not copies of it."""

    def in_host(x: Any) -> Any:
        return cpu_kernels.in_host(x) if isinstance(x, Tensor) and x.is_cuda else x

    return tree_map(in_host, (list(args), kwargs))


def install(engine: ModuleType) -> None:
    """Let verlite.rollout.engines.vllm choose what can be computed here."""
    from triton.runtime import interpreter
    from vllm.config.attention import AttentionConfig
    from vllm.config.compilation import CompilationConfig
    from vllm.config.kernel import IrOpPriorityConfig, KernelConfig
    from vllm.distributed.device_communicators import cuda_wrapper
    from vllm.platforms import current_platform

    cuda_wrapper.find_loaded_library = lambda name: os.environ["LD_PRELOAD"]
    type(current_platform).opaque_attention_op = classmethod(lambda cls: False)
    warmup = ModuleType("vllm.model_executor.warmup.kernel_warmup")
    warmup.__dict__["kernel_warmup"] = lambda worker: None
    sys.modules[warmup.__name__] = warmup
    os.environ["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    chosen = engine.engine_args

    def engine_args(options: Any) -> Any:
        args = chosen(options)
        if options.device.type == "cuda":
            args.enforce_eager = True
            args.attention_config = AttentionConfig(backend="TRITON_ATTN")  # type: ignore[arg-type]
            args.compilation_config = CompilationConfig(custom_ops=["none"])
            native = IrOpPriorityConfig(rms_norm=["native"], fused_add_rms_norm=["native"])
            args.kernel_config = KernelConfig(ir_op_priority=native)
        return args

    executor: Any = interpreter.GridExecutor
    executor._init_args_hst, executor._restore_args_dev = _in_place, lambda *_: None
    engine.__dict__["engine_args"] = engine_args
    cpu_kernels.install()
