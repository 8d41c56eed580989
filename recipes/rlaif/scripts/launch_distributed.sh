#!/usr/bin/env bash
# Train on the hosts of config/hostfile with the services and models of config/nodes.yaml:
#   ./scripts/launch_distributed.sh [key=value ...]
# Options of `verlite launch hostfile` go before a --:
#   ./scripts/launch_distributed.sh --service-wait 600 -- [key=value ...]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
options=()
for argument in "$@"; do
    if [ "$argument" = -- ]; then
        while [ "$1" != -- ]; do options+=("$1"); shift; done
        shift
        break
    fi
done
exec "${PYTHON:-python}" -m verlite launch hostfile --nodes config/nodes.yaml --hostfile config/hostfile \
    ${options[@]+"${options[@]}"} -- --config-path=config --config-name=train_grpo "$@"
