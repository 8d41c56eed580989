#!/usr/bin/env bash
# End the Ray that start_ray.sh has started on this node:  bash ray_utils/stop_ray.sh
set -euo pipefail
exec "${PYTHON:-python}" -m verlite cluster stop "$@"
