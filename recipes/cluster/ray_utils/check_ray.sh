#!/usr/bin/env bash
# Wait until the cluster has N devices in all:  bash ray_utils/check_ray.sh N
# More options go to `verlite cluster check`, for example --wait 60.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
exec "${PYTHON:-python}" -m verlite cluster check --shared "$here" "$@"
