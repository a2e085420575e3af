#!/usr/bin/env bash
# Install the wheel in dist/ into an empty environment, and use it from a folder that has nothing of the sources, as its
# user does: a model directory, a TOML file, 20 rows. Then the op tests on every set of kernels that this processor runs.
# Called by `make test-wheel`.
#   PYTHON  interpreter of the environment (python3); it must be the one that the wheel is for
#   WORK    folder of the environment and of what it does (a temporary one, removed at the end)
set -euo pipefail
ROOT=$(cd "$(dirname "$0")/.." && pwd)
PYTHON=${PYTHON:-python3}
shopt -s nullglob
wheels=("$ROOT"/dist/megatron_brorl-*.whl)
[[ ${#wheels[@]} == 1 ]] || {
  echo "test_wheel: dist/ has ${#wheels[@]} wheels; make wheel builds the one to test" >&2
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

# A user's data and configuration; the model is made from nothing, by a tool of the checkout.
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

# By its older name, from the checkout: the package is the installed one all the same.
python "$ROOT/tools/convert_checkpoint.py" to-hf runs/run/checkpoints/step_00000002 trained --config runs/run/model
python - <<'CHECK'
import megatron_brorl, sys
assert megatron_brorl.__file__.startswith(sys.prefix), megatron_brorl.__file__
CHECK

# Each set of kernels against float64 references.
for level in x86-64 x86-64-v3 x86-64-v4; do
  if ! BRORL_CPU=$level python -c 'from megatron_brorl.ops.fused import native' 2>"$WORK/refused"; then
    tail -n 1 "$WORK/refused" # this processor does not run it, or there is no choice
    continue
  fi
  echo "test_wheel: op tests on $level"
  BRORL_CPU=$level pytest -p no:cacheprovider -m "not full" "$ROOT/tests/ops" "$ROOT/tests/unit/ops"
done
