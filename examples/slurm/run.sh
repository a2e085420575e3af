#!/usr/bin/env bash
# Run a command as every rank of a Slurm allocation; requeue the job when the ranks saved and stopped for a signal.
# Usage, in a job: bash examples/slurm/run.sh command [argument ...]
set -euo pipefail
HERE=$(cd "$(dirname "$0")" && pwd)
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
export MASTER_ADDR MASTER_PORT

# Slurm sends its warning (--signal) and a preemption's SIGTERM to the ranks too: they save, and this waits for them for as
# long as Slurm lets it. A rank leaves with 75 when the state of all is saved, and does not end the others at once: they
# have 15 minutes.
trap ':' TERM HUP USR1
srun --kill-on-bad-exit=0 --wait=900 bash "$HERE/rank.sh" "$@" &
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
