#!/usr/bin/env bash
# Train a tiny model with an agent, which calls it through the openai package.
# Usage: [RUN=directory] [PROCESSES=2] bash examples/agent.sh guess|check [section.key=value ...]
set -euo pipefail
cd "$(dirname "$0")/.."

if [ -x .venv/bin/brorl ]; then PATH="$PWD/.venv/bin:$PATH"; fi
NAME=${1:?agent.sh: name an example: guess or check}
shift
if ! python -c "import openai, uvicorn" 2>/dev/null; then
  echo "agent.sh: agents need openai and uvicorn: pip install '.[agents]'" >&2
  exit 2
fi
RUN=${RUN:-runs/$NAME}
CONFIG=examples/agents/$NAME.toml
TURNS="data.train=[\"runs/agents/${NAME}_turns.jsonl\"]"

if [ ! -f "$RUN/sft/model/config.json" ]; then
  echo "== 1/3 data, a random model and a tokenizer: $RUN/init"
  python examples/agents/make_data.py
  python tools/make_tiny_model.py "$CONFIG" "$RUN/init" "$TURNS" --vocab 140 --context 256 --chat
  echo "== 2/3 warm start on turns: $RUN/sft"
  brorl sft --processes "${PROCESSES:-2}" "$CONFIG" "$@" agent.function= "$TURNS" model.path="$RUN/init" run.dir="$RUN/sft"
fi
echo "== 3/3 reinforcement learning: $RUN"
exec brorl train --processes "${PROCESSES:-2}" "$CONFIG" "$@" model.path="$RUN/sft/model" run.dir="$RUN"
