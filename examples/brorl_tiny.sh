#!/usr/bin/env bash
# BroRL on a laptop: create a model of about a million parameters with a tokenizer, warm-start it on solved examples, and
# train it with 512 rollouts per prompt in two processes. GPUs use the same code path.
# Usage: [RUN=directory] [PROCESSES=2] bash examples/brorl_tiny.sh [section.key=value ...]
set -euo pipefail
cd "$(dirname "$0")/.."

if [ -x .venv/bin/brorl ]; then PATH="$PWD/.venv/bin:$PATH"; fi
RUN=${RUN:-runs/brorl_tiny}
PROCESSES=${PROCESSES:-2}
CONFIG=${CONFIG:-examples/brorl_tiny.toml}

if [ ! -f "$RUN/sft/model/config.json" ]; then
  echo "== 1/3 a random model and a tokenizer: $RUN/init"
  python tools/make_tiny_model.py "$CONFIG" "$RUN/init" "$@"
  echo "== 2/3 warm start on solved examples: $RUN/sft"
  brorl sft --processes "$PROCESSES" "$CONFIG" "$@" model.path="$RUN/init" run.dir="$RUN/sft"
fi
if [ -n "${SFT_ONLY:-}" ]; then exit; fi
echo "== 3/3 reinforcement learning: $RUN"
exec brorl train --processes "$PROCESSES" "$CONFIG" "$@" model.path="$RUN/sft/model" run.dir="$RUN"
