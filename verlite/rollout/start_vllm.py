"""Importing this imports vLLM, the longest part of its start, for a process that waits to be told what to build."""

from verlite.rollout.vllm import set_environment

set_environment()
import vllm.v1.engine.llm_engine  # noqa: E402, F401
