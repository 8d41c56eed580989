#!/usr/bin/env bash
# Train on math, each role on GPUs of its own:
#   bash recipes/math/run_main_math_pipeline_grpo.sh [NAME] [key=value ...]
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
if [[ $# -eq 0 || $1 == *=* ]]; then set -- qwen2.5-1.5b-grpo-pipeline "$@"; fi
exec bash "$here/run_main_math_grpo.sh" "$@"
