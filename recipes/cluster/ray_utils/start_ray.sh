#!/usr/bin/env bash
# Start Ray on this node:  RANK=0 bash ray_utils/start_ray.sh   (the head; RANK=1, 2, ... join it)
# This folder must be shared by all nodes. RAY_PORT: port of the head (6379).
# More options go to `verlite cluster start`, for example --num-cpus 8 or --block.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
exec "${PYTHON:-python}" -m verlite cluster start --shared "$here" "$@"
