#!/usr/bin/env bash
# A small setting in which N = 512 came out ahead (docs/results): 24 prompts that a model answers rightly between once
# in 512 times and once in 16, seventy times as long as their answers, asked again and again with N = 16 or N = 512 for
# the same time.
# Usage: [RUN=directory] [PROCESSES=2] bash examples/hard_prompts_tiny.sh [--seconds S] [--seeds ...] [section.key=value ...]
set -euo pipefail
cd "$(dirname "$0")/.."

if [ -x .venv/bin/brorl ]; then PATH="$PWD/.venv/bin:$PATH"; fi
RUN=${RUN:-runs/hard_prompts_tiny}
PROCESSES=${PROCESSES:-2}
CONFIG=examples/hard_prompts_tiny.toml
MODEL=$RUN/sft/model

if [ ! -f "$MODEL/config.json" ]; then
  echo "== 1/4 a random model and a tokenizer: $RUN/init"
  python tools/make_tiny_model.py "$CONFIG" "$RUN/init" --context 640
  echo "== 2/4 warm start, without the instructions and then with them: $RUN/short, $RUN/sft"
  brorl sft --processes "$PROCESSES" "$CONFIG" model.path="$RUN/init" run.dir="$RUN/short" data.train_seed=3 \
    'data.template={prompt}=' sft.steps=140 sft.lr=2e-3
  brorl sft --processes "$PROCESSES" "$CONFIG" model.path="$RUN/short/model" run.dir="$RUN/sft" data.train_seed=4
fi
if [ ! -f "$RUN/prompts.jsonl" ]; then
  echo "== 3/4 prompts that are right 1 to 32 times out of 512: $RUN/prompts.jsonl"
  brorl evaluate --processes "$PROCESSES" "$CONFIG" model.path="$MODEL" run.dir="$RUN/pilot" --samples 512
  python tools/select_prompts.py "$CONFIG" "$RUN/pilot/evaluation.jsonl" "$RUN/prompts.jsonl" --right 1 32 --count 24 \
    model.path="$MODEL"
fi
echo "== 4/4 N = 16 and N = 512 on them: $RUN"
exec python tools/prorl_vs_brorl.py "$CONFIG" "$RUN" --processes "$PROCESSES" --model "$MODEL" --lr 1e-4 \
  --prompts 24 24 --every 16 2 --samples 64 "data.train=[\"$RUN/prompts.jsonl\"]" \
  "data.held_out=[\"$RUN/prompts.jsonl\"]" data.tasks=[] 'data.template={prompt}' "$@"
