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
# BroRL on a 1.5B model. brorl_1.5b.toml has the values and their sources. This file is both bash and Python:
#
#   torchrun --nproc-per-node 8 examples/brorl_1.5b.sh [section.key=value ...]    ranks of this node, by torchrun
#   bash examples/brorl_1.5b.sh [section.key=value ...]                           one rank per GPU of this node
#   sbatch examples/brorl_1.5b.sh [section.key=value ...]                         8 nodes of 8 GPUs, from the repository
#
# With --smoke, each of them trains a tiny model of the same architecture for two steps on CPUs, with the built-in engine.
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

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / "examples" / "brorl_1.5b.toml"
# --smoke changes only these keys of brorl_1.5b.toml.
SMOKE_SIZES = """
run.dir=runs/brorl_1.5b_smoke data.held_out_prompts=16 rollout.n=64 rollout.prompts=12 rollout.max_tokens=24
algo.mini_batches=2 train.steps=2 train.tokens_per_micro_batch=4096 train.checkpoint_every=1 evaluate.samples=2
""".split()
SMOKE_ON_A_CPU = ["rollout.engine=torch"]  # TensorRT-LLM needs a GPU
SHAPE = "--untied --hidden 96 --layers 4 --heads 12 --kv-heads 2 --ffn 560 --context 16384 --vocab 600 --texts 300".split()
CHAT = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
# Enough training to answer between tags, so that some rollouts are correct.
WARM_START = """
model.dtype=fp32 model.context=0 parallel.distributed_optimizer=false data.tasks=[] data.held_out_prompts=8
sft.steps=50 sft.examples_per_step=24 sft.lr=5e-3
""".split()
OF_A_JOB = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC", "SLURM")


def make_tiny_model(directory: Path) -> None:
    """Write a small Qwen2 model with a chat template, trained to answer two of the tasks between answer tags."""
    from reasoning_gym import create_dataset

    environment = {k: v for k, v in os.environ.items() if not k.startswith(OF_A_JOB)}
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=f".{directory.name}.") as aside:
        raw, trained = Path(aside, "raw"), Path(aside, "sft")
        make = [str(ROOT / "tools" / "make_tiny_model.py"), str(CONFIG), str(raw), *SHAPE]
        subprocess.run([sys.executable, *make], stdout=subprocess.DEVNULL, env=environment, check=True)
        settings = json.loads((raw / "tokenizer_config.json").read_text())
        (raw / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": CHAT}))

        rows = [row for name in ("syllogism", "gcd") for row in create_dataset(name, size=400, seed=1)]
        solved = [{"prompt": r["question"], "answer": f"<answer>{r['answer']}</answer>"} for r in rows]
        (raw / "solved.jsonl").write_text("".join(json.dumps(row) + "\n" for row in solved))
        paths = [f"model.path={raw}", f"run.dir={trained}", f'data.train=["{raw}/solved.jsonl"]']
        sft = ["-m", "megatron_brorl", "sft", "--processes", "1", str(CONFIG), *paths, *WARM_START]
        subprocess.run([sys.executable, *sft], stdout=subprocess.DEVNULL, env=environment, check=True)
        (trained / "model").rename(directory)


def tiny_model(directory: Path) -> None:
    """Create the model of --smoke on rank 0. The other ranks wait for it."""
    if int(os.environ.get("RANK", "0")) == 0 and not directory.exists():
        print(f"brorl_1.5b: creating {directory}, a tiny model for --smoke", flush=True)
        directory.parent.mkdir(parents=True, exist_ok=True)
        try:
            make_tiny_model(directory)
        except subprocess.CalledProcessError:
            sys.exit("brorl_1.5b: cannot create the tiny model (see the messages above)")
    deadline = time.monotonic() + 600
    while not directory.exists():
        if time.monotonic() > deadline:
            sys.exit(f"brorl_1.5b: rank 0 has not created {directory} within 600 s")
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
        options = [*SMOKE_SIZES, *SMOKE_ON_A_CPU, f"model.path={model}"]
    brorl(["train", str(CONFIG), *options, *arguments])


if __name__ == "__main__":  # Megatron's checkpoint writers import this file again
    main()
# the end of the Python part
