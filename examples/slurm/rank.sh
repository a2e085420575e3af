#!/usr/bin/env bash
# One rank: Slurm's numbers under the names that torch.distributed reads. Started by srun, of run.sh.
set -euo pipefail
export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID
export LOCAL_WORLD_SIZE=$((SLURM_NTASKS / SLURM_NNODES))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((${SLURM_CPUS_ON_NODE:-1} / LOCAL_WORLD_SIZE > 0 ? ${SLURM_CPUS_ON_NODE:-1} / LOCAL_WORLD_SIZE : 1))}
exec "$@"
