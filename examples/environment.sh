#!/usr/bin/env bash
# Reinforcement learning with an environment: write the data, create a model of about a million parameters, warm-start it on examples with
# several turns, and train it in two processes.
# Usage: [RUN=directory] [PROCESSES=2] bash examples/environment.sh calculator|guessing [section.key=value ...]
set -euo pipefail
cd "$(dirname "$0")/.."

if [ -x .venv/bin/brorl ]; then PATH="$PWD/.venv/bin:$PATH"; fi
NAME=${1:?environment.sh: name an example: calculator or guessing}
shift
RUN=${RUN:-runs/$NAME}
PROCESSES=${PROCESSES:-2}
CONFIG=examples/environments/$NAME.toml

if [ ! -f "$RUN/sft/model/config.json" ]; then
  echo "== 1/3 data, a random model and a tokenizer: $RUN/init"
  python examples/environments/make_data.py runs/environments
  python tools/make_tiny_model.py "$CONFIG" "$RUN/init" "$@" --vocab 140
  echo "== 2/3 warm start on solved examples: $RUN/sft"
  brorl sft --processes "$PROCESSES" "$CONFIG" "$@" model.path="$RUN/init" run.dir="$RUN/sft"
fi
echo "== 3/3 reinforcement learning: $RUN"
exec brorl train --processes "$PROCESSES" "$CONFIG" "$@" model.path="$RUN/sft/model" run.dir="$RUN"
