#!/usr/bin/env bash
# Trains a model from one TOML file, on this machine or as one node of several.
#
#   ./run_train.sh [--job.config_file FILE] [--section.key VALUE ...]
#
# Without --job.config_file it trains the small model of train_configs/debug.toml. Relative paths are relative to the
# folder it is called from. Environment variables:
#   NGPU          processes on this node (default: its CUDA devices, else 1)
#   NNODES        nodes in all (default: 1); with more, also NODE_RANK, MASTER_ADDR and MASTER_PORT (default: 29500)
set -euo pipefail

repository=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
# shellcheck source=scripts/environment.sh
source "$repository/scripts/environment.sh"

names_config_file() {
    local argument
    for argument in "$@"; do
        case "$argument" in
            --job.config_file | --job.config-file | --job.config_file=* | --job.config-file=*) return 0 ;;
        esac
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
require_integer NGPU "$num_processes" 1
require_integer NNODES "$num_nodes" 1

if ! names_config_file "$@"; then
    set -- --job.config_file "$repository/train_configs/debug.toml" "$@"
fi

if ((num_nodes > 1)); then
    require_integer NODE_RANK "${NODE_RANK:-}" 0
    if [[ -z "${MASTER_ADDR:-}" ]]; then
        die 2 "NNODES=$num_nodes needs MASTER_ADDR: give the address of the node whose NODE_RANK is 0"
    fi
    rendezvous=(--nnodes "$num_nodes" --node_rank "$NODE_RANK"
        --master_addr "$MASTER_ADDR" --master_port "${MASTER_PORT:-29500}")
elif ((num_processes > 1)); then
    rendezvous=(--standalone)
else
    exec "$PYTHON" -m spider_titan.train "$@"
fi
exec "$PYTHON" -m spider_titan.launch "${rendezvous[@]}" --nproc_per_node "$num_processes" -m spider_titan.train "$@"
