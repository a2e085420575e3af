#!/usr/bin/env bash
# Run a command as every rank of a Slurm allocation. Requeue the job if a signal made the ranks save and stop.
# Usage, in a job: bash examples/slurm/run.sh command [argument ...]
#
# To run in a container, set these variables for sbatch:
#   CONTAINER=pyxis      use enroot; srun must have pyxis. The image is a .sqsh file or REGISTRY#IMAGE
#   CONTAINER=apptainer  use apptainer, which the nodes must have. The image is a .sif file or docker://IMAGE
#   CONTAINER_IMAGE      the image, with this project installed (Dockerfile)
#   CONTAINER_MOUNTS     mounts (/data:/data,...) in addition to the folder that the job was submitted from
set -euo pipefail
: "${SLURM_JOB_ID:?start this script in a Slurm job}"
HERE=$(cd "$(dirname "$0")" && pwd)
FOLDER=${SLURM_SUBMIT_DIR:-$PWD}
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
while (: <>"/dev/tcp/127.0.0.1/$MASTER_PORT") 2>/dev/null; do # this is the node of rank 0; skip ports that are in use
  MASTER_PORT=$((MASTER_PORT + 1))
done
export MASTER_ADDR MASTER_PORT

# Older versions, such as 22.05, do not set the end time of the job, which the ranks need to save in time.
if [ -z "${SLURM_JOB_END_TIME:-}" ]; then
  SLURM_JOB_END_TIME=$(SLURM_TIME_FORMAT=%s scontrol show job "$SLURM_JOB_ID" | sed -n 's/.* EndTime=\([0-9]\{1,\}\) .*/\1/p')
fi
export SLURM_JOB_END_TIME # empty for a job without a limit

# Request the resources of the job for the step: since 22.05, srun does not inherit --cpus-per-task.
CPUS=${SLURM_CPUS_PER_TASK:-$((SLURM_CPUS_ON_NODE * SLURM_NNODES / SLURM_NTASKS))}
STEP=(--exclusive --mem=0 --cpus-per-task="$((CPUS > 0 ? CPUS : 1))")

# rank.sh runs inside of a pyxis container, but outside of an apptainer container, which inherits its variables.
RANK=(bash "$HERE/rank.sh")
MOUNTS=$FOLDER:$FOLDER${CONTAINER_MOUNTS:+,$CONTAINER_MOUNTS}
IMAGE=${CONTAINER_IMAGE:-}
case "${CONTAINER:-none}${IMAGE:+ IMAGE}" in
none) ;;
"pyxis IMAGE") STEP+=(--container-image="$IMAGE" --container-mounts="$MOUNTS" --container-workdir="$FOLDER") ;;
"apptainer IMAGE") RANK+=(apptainer exec --nv --bind "$MOUNTS" --pwd "$FOLDER" "$IMAGE") ;;
*)
  echo "run.sh: CONTAINER=${CONTAINER:-} CONTAINER_IMAGE=$IMAGE: give both, the first as pyxis or apptainer, or neither" >&2
  exit 2
  ;;
esac

# Slurm sends the signals of --signal and of preemption to the ranks too. They save, and this script waits for them. A
# rank exits with 75 when all ranks have saved. The others are not killed immediately, but have 15 minutes to exit.
trap ':' TERM HUP USR1
srun --kill-on-bad-exit=0 --wait=900 "${STEP[@]}" "${RANK[@]}" "$@" &
STATUS=0
while true; do
  wait $! && STATUS=0 || STATUS=$?
  kill -0 $! 2>/dev/null || break # otherwise a trapped signal ended the wait
done
# After scancel the ranks save too, but the job is COMPLETING then and must not start again. If squeue fails, it does.
if [ "$STATUS" -eq 75 ] && [ "$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T)" != COMPLETING ]; then
  echo "run.sh: the state is saved; requeueing job $SLURM_JOB_ID"
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$STATUS"
