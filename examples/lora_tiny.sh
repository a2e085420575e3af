#!/usr/bin/env bash
# LoRA on a laptop: train adapters of rank 16 on the warm-started model of brorl_tiny.sh, with N = 512 in two processes.
# Usage: [START=directory of brorl_tiny.sh] [RUN=directory] [PROCESSES=2] bash examples/lora_tiny.sh [section.key=value ...]
set -euo pipefail
cd "$(dirname "$0")/.."

if [ -x .venv/bin/brorl ]; then PATH="$PWD/.venv/bin:$PATH"; fi
START=${START:-runs/brorl_tiny}
RUN=${RUN:-runs/lora_tiny}

if [ ! -f "$START/sft/model/config.json" ]; then
  SFT_ONLY=1 RUN="$START" bash examples/brorl_tiny.sh
fi
exec brorl train --processes "${PROCESSES:-2}" examples/brorl_tiny.toml lora.rank=16 optim.lr=2e-3 "$@" \
  model.path="$START/sft/model" run.dir="$RUN"
