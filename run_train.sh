#!/usr/bin/env bash
# Trains a model from one TOML file, on this machine or as one node of several.
#
#   ./run_train.sh [--job.config_file FILE] [--section.key VALUE ...]
#
# Without --job.config_file it trains the small model of train_configs/debug.toml. Relative paths are relative to the
# folder it is called from. Environment variables:
#   NGPU          processes on this node (default: its CUDA devices, else 1)
#   NNODES        nodes in all (default: 1); with more, also NODE_RANK, MASTER_ADDR and MASTER_PORT (default: 29500)
#   MAX_RESTARTS  how often all processes are started again when one has failed (default: 0)
#
# With --job.dry_run one process describes what NGPU x NNODES would do.
set -euo pipefail

repository=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
# shellcheck source=scripts/environment.sh
source "$repository/scripts/environment.sh"

# Usage: is_among PATTERN ARGUMENT...
# An underscore of the pattern also matches a dash, as in the options themselves.
is_among() {
    local pattern=$1 argument
    shift
    for argument in "$@"; do
        # shellcheck disable=SC2053
        if [[ "${argument//-/_}" == $pattern ]]; then
            return 0
        fi
    done
    return 1
}

# Importing torch takes seconds, so it is asked only where there is an NVIDIA driver.
count_processes() {
    local devices=0
    if command -v nvidia-smi >/dev/null; then
        devices=$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())')
    fi
    echo $((devices > 0 ? devices : 1))
}

# Usage: require_integer NAME VALUE MINIMUM
require_integer() {
    if [[ ! "$2" =~ ^[0-9]{1,9}$ ]] || ((10#$2 < $3)); then
        die 2 "$1=$2: give a whole number of at least $3"
    fi
}

prepare_environment "$repository"

num_processes=${NGPU:-$(count_processes)}
num_nodes=${NNODES:-1}
max_restarts=${MAX_RESTARTS:-0}
require_integer NGPU "$num_processes" 1
require_integer NNODES "$num_nodes" 1
require_integer MAX_RESTARTS "$max_restarts" 0

if ! is_among '__job.config_file*' "$@"; then
    set -- --job.config_file "$repository/train_configs/debug.toml" "$@"
fi

if is_among '__job.dry_run' "$@"; then
    export SPIDER_TITAN_DRY_RUN_RANKS=$((10#$num_processes * 10#$num_nodes))
    exec "$PYTHON" -m spider_titan.train "$@"
fi

launcher=(-m spider_titan.launch --nproc-per-node "$num_processes" --max-restarts "$max_restarts")
if ((num_nodes > 1)); then
    require_integer NODE_RANK "${NODE_RANK:-}" 0
    if [[ -z "${MASTER_ADDR:-}" ]]; then
        die 2 "NNODES=$num_nodes needs MASTER_ADDR: give the address of the node whose NODE_RANK is 0"
    fi
    launcher+=(--nnodes "$num_nodes" --node-rank "$NODE_RANK"
        --master-addr "$MASTER_ADDR" --master-port "${MASTER_PORT:-29500}")
elif ((num_processes == 1 && max_restarts == 0)) || is_among '__help' "$@" || is_among '_h' "$@"; then
    exec "$PYTHON" -m spider_titan.train "$@"
fi
exec "$PYTHON" "${launcher[@]}" -- "$@"
