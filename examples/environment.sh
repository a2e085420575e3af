#!/usr/bin/env bash
# Train a tiny model with an environment, as examples/brorl_tiny.sh does without one.
# Usage: [RUN=directory] [PROCESSES=2] bash examples/environment.sh calculator|guessing [section.key=value ...]
set -euo pipefail
cd "$(dirname "$0")/.."

if [ -x .venv/bin/brorl ]; then PATH="$PWD/.venv/bin:$PATH"; fi
NAME=${1:?environment.sh: name an example: calculator or guessing}
shift
RUN=${RUN:-runs/$NAME}
CONFIG=examples/environments/$NAME.toml

if [ ! -f "$RUN/sft/model/config.json" ]; then
  echo "== 1/3 data, a random model and a tokenizer: $RUN/init"
  python examples/environments/make_data.py
  python tools/make_tiny_model.py "$CONFIG" "$RUN/init" "$@" --vocab 140
  echo "== 2/3 warm start on solved examples: $RUN/sft"
  brorl sft --processes "${PROCESSES:-2}" "$CONFIG" "$@" model.path="$RUN/init" run.dir="$RUN/sft"
fi
echo "== 3/3 reinforcement learning: $RUN"
exec brorl train --processes "${PROCESSES:-2}" "$CONFIG" "$@" model.path="$RUN/sft/model" run.dir="$RUN"
