#!/usr/bin/env bash
# Train on math, all roles on all GPUs:  bash recipes/math/run_main_math_grpo.sh [NAME] [key=value ...]
# NAME is a file of recipes/math/config without .yaml. Run it on the head node.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
name=qwen2.5-1.5b-grpo
if [[ $# -gt 0 && $1 != *=* ]]; then name=$1; shift; fi
exec "${PYTHON:-python}" -m verlite.main_ppo --config-path "$here/config" --config-name "$name" "$@"
