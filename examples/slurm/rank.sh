#!/usr/bin/env bash
# Start one rank: set the variables of torch.distributed from those of Slurm. run.sh starts this script by srun.
set -euo pipefail
export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID
export LOCAL_WORLD_SIZE=$((SLURM_NTASKS / SLURM_NNODES))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}} # set by the srun of run.sh
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}                                # print errors of NCCL
ulimit -n "$(ulimit -Hn)" # of open files: gloo has up to three sockets for every rank, and rank 0's store one
exec "$@"
