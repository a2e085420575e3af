#!/usr/bin/env bash
# Run the engine tests on vLLM. It is installed once into a separate environment in $VLLM: 3.5 GB, about five minutes.
# If it cannot be installed, the script prints one line and succeeds. Called by `make test-vllm`.
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
  [[ $(uname -m) == x86_64 ]] || skip "the tested CPU build of vLLM is for x86_64, and this machine is $(uname -m)"
  [[ $(df --output=avail -BG . | tail -n 1 | tr -dc 0-9) -ge 10 ]] || skip "vLLM needs 10 GB of disk space during the installation"
  rm -rf "$VLLM"
  "$PYTHON" -m venv "$VLLM"
  pip_install() { "$VLLM/bin/pip" install --quiet --disable-pip-version-check "$@" 2>>"$VLLM/install.log"; }

  # Install torch from PyTorch's index if it can be reached, otherwise from the index that pip is configured for.
  torch=$(grep ^torch== tools/vllm.txt)
  pip_install --no-deps --retries 1 --index-url "$CPU_INDEX" "$torch" || pip_install --no-deps "$torch" ||
    skip "$torch cannot be installed ($VLLM/install.log)"
  pip_install -r tools/vllm.txt || skip "pip cannot install tools/vllm.txt ($VLLM/install.log)"
  # vLLM requires these packages but works without them. Builds for another torch would break its import.
  "$VLLM/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec 2>>"$VLLM/install.log"
  touch "$VLLM/.installed"
fi

BRORL_VLLM_PYTHON="$PWD/$VLLM/bin/python" "$VENV/bin/python" -m pytest tests/real_vllm "$@"
