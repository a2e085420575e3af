#!/usr/bin/env bash
# Run a command as every rank of a Slurm allocation; requeue the job when the ranks saved and stopped for a signal.
# Usage, in a job: bash examples/slurm/run.sh command [argument ...]
#
# In a container, where the environment of sbatch asks for one:
#   CONTAINER=pyxis      the image (a .sqsh file, or REGISTRY#IMAGE) by enroot; srun must have pyxis
#   CONTAINER=apptainer  the image (a .sif file, or docker://IMAGE) by apptainer, which the nodes must have
#   CONTAINER_IMAGE      that image, with this project installed (Dockerfile)
#   CONTAINER_MOUNTS     what it sees of the host (/data:/data,...) beside the folder that the job was submitted from
set -euo pipefail
HERE=$(cd "$(dirname "$0")" && pwd)
FOLDER=${SLURM_SUBMIT_DIR:-$PWD}
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
while (: <>"/dev/tcp/127.0.0.1/$MASTER_PORT") 2>/dev/null; do # this is the node of rank 0, where somebody listens there
  MASTER_PORT=$((MASTER_PORT + 1))
done
export MASTER_ADDR MASTER_PORT

# Older versions (22.05 is one) do not say when the job ends, before which the ranks save.
if [ -z "${SLURM_JOB_END_TIME:-}" ]; then
  SLURM_JOB_END_TIME=$(SLURM_TIME_FORMAT=%s scontrol show job "$SLURM_JOB_ID" | sed -n 's/.* EndTime=\([0-9]\{1,\}\) .*/\1/p')
fi
export SLURM_JOB_END_TIME # empty for a job without a limit

# A step gets what the job has only where it asks for it: since 22.05 srun does not take --cpus-per-task from the job.
CPUS=${SLURM_CPUS_PER_TASK:-$((SLURM_CPUS_ON_NODE * SLURM_NNODES / SLURM_NTASKS))}
STEP=(--exclusive --mem=0 --cpus-per-task="$((CPUS > 0 ? CPUS : 1))")

# The ranks' numbers are set inside of pyxis' container, and outside of apptainer's, which takes them along.
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

# Slurm sends its warning (--signal) and a preemption's SIGTERM to the ranks too: they save, and this waits for them for as
# long as Slurm lets it. A rank leaves with 75 when the state of all is saved, and does not end the others at once: they
# have 15 minutes.
trap ':' TERM HUP USR1
srun --kill-on-bad-exit=0 --wait=900 "${STEP[@]}" "${RANK[@]}" "$@" &
STATUS=0
while true; do
  wait $! && STATUS=0 || STATUS=$?
  kill -0 $! 2>/dev/null || break # otherwise a trapped signal ended the wait
done
if [ "$STATUS" -eq 75 ]; then
  echo "run.sh: the state is saved; job $SLURM_JOB_ID goes back to the queue"
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$STATUS"
