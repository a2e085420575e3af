#!/usr/bin/env bash
# One rank: Slurm's numbers under the names that torch.distributed reads. Started by srun, of run.sh.
set -euo pipefail
export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID
export LOCAL_WORLD_SIZE=$((SLURM_NTASKS / SLURM_NNODES))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}} # run.sh has srun set it
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}                                # what failed, in the output of the rank that saw it
exec "$@"
