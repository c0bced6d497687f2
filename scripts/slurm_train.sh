#!/usr/bin/env bash
#SBATCH --job-name=spider-titan
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --output=slurm-%j.log
# Trains on the nodes of a SLURM job: one task a node, each of which starts run_train.sh with the arguments given here.
#
#   sbatch --nodes 4 --gpus-per-node 8 scripts/slurm_train.sh --job.config_file FILE [--section.key VALUE ...]
#
# Submit it from the repository's folder, on a file system that all nodes share. Environment variables that run_train.sh
# reads are passed on; what SLURM knows is taken from it:
#   NGPU          processes on each node (default: SLURM_GPUS_ON_NODE, else as in run_train.sh)
#   MASTER_PORT   free port of the first node (default: 20000 + job number modulo 10000)
set -euo pipefail

# SLURM runs a copy of this file that lies elsewhere.
repository=${SLURM_SUBMIT_DIR:-$PWD}
if [[ -z "${SLURM_JOB_ID:-}" || ! -f "$repository/scripts/environment.sh" ]]; then
    echo "[spider-titan] error: submit this script with sbatch, from the folder of the repository" >&2
    exit 2
fi
# shellcheck source=scripts/environment.sh
source "$repository/scripts/environment.sh"
# Once, before many nodes would do it at the same time.
prepare_environment "$repository"

hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
export MASTER_ADDR=${hosts%%$'\n'*}
export MASTER_PORT=${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 10000))}
export NNODES=$SLURM_JOB_NUM_NODES
if [[ -n "${SLURM_CPUS_PER_TASK:-}" ]]; then
    # srun does not take it over from sbatch.
    export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
fi

# Only within a task SLURM_NODEID is its node's number. Without --cpu-bind=none a task may get a single core.
# shellcheck disable=SC2016
exec srun --nodes "$NNODES" --ntasks "$NNODES" --ntasks-per-node 1 --cpu-bind none --kill-on-bad-exit 1 \
    bash -c 'export NODE_RANK=$SLURM_NODEID NGPU=${NGPU:-${SLURM_GPUS_ON_NODE:-}}; exec "$0" "$@"' \
    "$repository/run_train.sh" "$@"
