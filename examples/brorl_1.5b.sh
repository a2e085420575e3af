#!/usr/bin/env bash
#SBATCH --job-name=brorl_1.5b
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=12
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@3600
#SBATCH --requeue
#SBATCH --open-mode=append
#
# BroRL on a 1.5B model; the values and their sources are in brorl_1.5b.toml. This file is bash and Python:
#
#   torchrun --nproc-per-node 8 examples/brorl_1.5b.sh [section.key=value ...]    ranks of this node, by torchrun
#   bash examples/brorl_1.5b.sh [section.key=value ...]                           one rank per GPU of this node
#   sbatch examples/brorl_1.5b.sh [section.key=value ...]                         8 nodes of 8 GPUs, from the repository
#
# With --smoke each of them runs one step of a tiny model of the same architecture on CPUs, with the built-in engine.
""":"
set -euo pipefail
HOME_DIR=${SLURM_SUBMIT_DIR:-$(cd "$(dirname "$0")/.." && pwd)} # Slurm runs a copy of this file
FILE=$HOME_DIR/examples/brorl_1.5b.sh
if [ ! -f "$FILE" ]; then
  echo "brorl_1.5b: $FILE is missing: submit the job from the root of the repository" >&2
  exit 2
fi
if [ -x "$HOME_DIR/.venv/bin/python" ]; then PATH="$HOME_DIR/.venv/bin:$PATH"; fi
if [ -n "${SLURM_JOB_ID:-}" ] && [ -z "${SLURM_STEP_ID:-}" ]; then
  exec bash "$HOME_DIR/examples/slurm/run.sh" python "$FILE" "$@"
fi
GPUS=$(nvidia-smi --list-gpus 2>/dev/null | wc -l || true)
PROCESSES=${PROCESSES:-$((GPUS > 0 ? GPUS : 1))}
exec python "$FILE" --processes "$PROCESSES" "$@"
: <<'# the end of the Python part'
":"""

import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / "examples" / "brorl_1.5b.toml"
SMOKE = """
run.dir=runs/brorl_1.5b_smoke model.dtype=fp32 model.context=0 parallel.distributed_optimizer=false data.chat=false
data.held_out_prompts=16 rollout.engine=torch rollout.refills=0 rollout.n=64 rollout.prompts=12 rollout.max_tokens=8
rollout.dtype=fp32 reward.extract=full reward.strict=false reward.cut_off_factor=1.0 algo.mini_batches=2
optim.lr=1e-3 train.steps=1 train.share_prompt=true train.tokens_per_micro_batch=2048 train.checkpoint_every=0
evaluate.samples=2
""".split()
SHAPE = "--untied --hidden 96 --layers 4 --heads 12 --kv-heads 2 --ffn 560 --context 4096 --vocab 256 --texts 300".split()


def tiny_model(directory: Path) -> None:
    """A random Qwen2 model with a tokenizer for the tasks, made by the first rank while the others wait for it."""
    if int(os.environ.get("RANK", "0")) == 0 and not directory.exists():
        aside = directory.with_name(f"{directory.name}.{os.getpid()}")
        tool = [sys.executable, str(ROOT / "tools" / "make_tiny_model.py"), str(CONFIG), str(aside), *SHAPE]
        if subprocess.run(tool, stdout=subprocess.DEVNULL).returncode:
            sys.exit(2)
        aside.rename(directory)
    deadline = time.monotonic() + 300
    while not directory.exists():
        if time.monotonic() > deadline:
            sys.exit(f"brorl_1.5b: rank 0 made no {directory} in 300 s")
        time.sleep(0.1)


def main() -> None:
    from megatron_brorl.cli.main import main as brorl

    os.chdir(ROOT)
    arguments = sys.argv[1:]
    options = []
    if "--smoke" in arguments:
        arguments.remove("--smoke")
        run_dir = next((a.partition("=")[2] for a in arguments if a.startswith("run.dir=")), "runs/brorl_1.5b_smoke")
        model = Path(run_dir).with_name(f"{Path(run_dir).name}_model")
        tiny_model(model)
        options = [*SMOKE, f"model.path={model}"]
    brorl(["train", str(CONFIG), *options, *arguments])


if __name__ == "__main__":  # Megatron's checkpoint writers import this file again
    main()
# the end of the Python part
