#!/usr/bin/env bash
# Install the wheel in dist/ into an empty environment and use it outside of the checkout: a model directory, a TOML file,
# 20 rows. Then run the op tests with every kernel set that this processor supports. Called by `make test-wheel`.
#   PYTHON  interpreter of the environment (python3); the wheel must be built for it
#   WORK    folder for the environment and the files (default: a temporary folder, removed at the end)
set -euo pipefail
ROOT=$(cd "$(dirname "$0")/.." && pwd)
PYTHON=${PYTHON:-python3}
shopt -s nullglob
wheels=("$ROOT"/dist/megatron_brorl-*.whl)
[[ ${#wheels[@]} == 1 ]] || {
  echo "test_wheel: dist/ has ${#wheels[@]} wheels instead of one; run make wheel" >&2
  exit 2
}
if [[ -z ${WORK:-} ]]; then
  WORK=$(mktemp -d)
  trap 'rm -rf "$WORK"' EXIT
fi
unset PYTHONPATH BRORL_CPU

"$PYTHON" -m venv "$WORK/venv"
PATH="$WORK/venv/bin:$PATH"
pip install --quiet --disable-pip-version-check "${wheels[0]}" pytest
mkdir -p "$WORK/user"
cd "$WORK/user"

# Data and configuration of a user. A tool of the checkout creates the model.
python - <<'ROWS'
import json
rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(5) for b in range(4)]
open("rows.jsonl", "w").write("\n".join(map(json.dumps, rows)))
ROWS
brorl init run.toml --model model --data rows.jsonl --held-out rows.jsonl
python "$ROOT/tools/make_tiny_model.py" run.toml model data.verifier=exact
brorl doctor
small=(data.verifier=exact rollout.n=4 rollout.prompts=4 rollout.max_tokens=8 train.steps=2 evaluate.samples=2)

brorl train --processes 2 run.toml "${small[@]}" train.checkpoint_every=1
brorl report runs/run
brorl rollouts runs/run --limit 2
brorl evaluate --processes 1 run.toml "${small[@]}" model.path=runs/run/model run.dir=runs/evaluation
brorl convert to-megatron runs/run/model megatron --tensor 2 --verify
brorl convert to-hf megatron back --verify
cmp runs/run/model/model.safetensors back/model.safetensors

# The converter's script in the checkout must use the installed package.
python "$ROOT/tools/convert_checkpoint.py" to-hf runs/run/checkpoints/step_00000002 trained --config runs/run/model
python - <<'CHECK'
import megatron_brorl, sys
assert megatron_brorl.__file__.startswith(sys.prefix), megatron_brorl.__file__
CHECK

# Test each kernel set against float64 references.
for level in x86-64 x86-64-v3 x86-64-v4; do
  if ! BRORL_CPU=$level python -c 'from megatron_brorl.ops.fused import native' 2>"$WORK/refused"; then
    tail -n 1 "$WORK/refused" # the processor does not support it, or the wheel has only one set
    continue
  fi
  echo "test_wheel: op tests on $level"
  BRORL_CPU=$level pytest -p no:cacheprovider -m "not slow" "$ROOT/tests/ops" "$ROOT/tests/unit/ops"
done
