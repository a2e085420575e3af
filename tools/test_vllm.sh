#!/usr/bin/env bash
# Run the engine tests on vLLM itself. It gets an environment of its own in $VLLM, made once: 3.5 GB, about five minutes.
# Where it cannot be installed one line says so, and nothing fails. Called by `make test-vllm`.
#   PYTHON       interpreter of the environment (python3)
#   VENV, VLLM   the project's environment (.venv) and vLLM's (.venv-vllm)
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
VENV=${VENV:-.venv}
VLLM=${VLLM:-.venv-vllm}
CPU_INDEX=https://download.pytorch.org/whl/cpu

skip() {
  echo "test_vllm: skipped: $1"
  exit 0
}

if [[ ! -f $VLLM/.installed || tools/vllm.txt -nt $VLLM/.installed ]]; then
  [[ $(uname -m) == x86_64 ]] || skip "vLLM's CPU build that is tested is for x86_64, this is $(uname -m)"
  [[ $(df --output=avail -BG . | tail -n 1 | tr -dc 0-9) -ge 10 ]] || skip "vLLM takes 3.5 GB and its downloads as much"
  rm -rf "$VLLM"
  "$PYTHON" -m venv "$VLLM"
  pip_install() { "$VLLM/bin/pip" install --quiet --disable-pip-version-check "$@" 2>>"$VLLM/install.log"; }

  # torch from PyTorch's own index where it is reached, else from the one that pip is configured for.
  torch=$(grep ^torch== tools/vllm.txt)
  pip_install --no-deps --retries 1 --index-url "$CPU_INDEX" "$torch" || pip_install --no-deps "$torch" ||
    skip "there is no $torch ($VLLM/install.log)"
  pip_install -r tools/vllm.txt || skip "pip cannot install tools/vllm.txt ($VLLM/install.log)"
  # It asks for them and works without; builds for other torches make it fail at import.
  "$VLLM/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec 2>>"$VLLM/install.log"
  touch "$VLLM/.installed"
fi

BRORL_VLLM_PYTHON="$PWD/$VLLM/bin/python" "$VENV/bin/python" -m pytest tests/real_vllm "$@"
