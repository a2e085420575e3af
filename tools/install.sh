#!/usr/bin/env bash
# Make $VENV and install the project with its test tools into it. Called by the Makefile.
set -euo pipefail
PYTHON=${PYTHON:-python3}
VENV=${VENV:-.venv}

"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || {
  echo "install: $("$PYTHON" --version) is too old: set PYTHON to a Python of 3.10 or newer" >&2
  exit 2
}
if "$PYTHON" -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
  echo "install: CUDA found; the environment uses the torch that is installed"
  "$PYTHON" -m venv --system-site-packages "$VENV"
else
  echo "install: no CUDA; the environment gets the CPU build of torch"
  "$PYTHON" -m venv "$VENV"
  # Its dependencies come below, from the index that pip is configured for.
  "$VENV/bin/pip" install --quiet --disable-pip-version-check --no-deps --retries 1 \
    --index-url https://download.pytorch.org/whl/cpu "torch==2.13.0" || {
    echo "install: PyTorch's CPU index did not answer; taking torch 2.13.0 from pip's own index" >&2
    "$VENV/bin/pip" install --quiet --disable-pip-version-check "torch==2.13.0"
  }
fi
# The extension is compiled against the torch of this environment, so pip must not build in one of its own; what the
# build needs is then ours to install. Naming torch brings the dependencies it came without, and leaves it as it is.
"$VENV/bin/pip" install --quiet --disable-pip-version-check torch numpy 'setuptools>=77' ninja
PATH="$(cd "$VENV/bin" && pwd):$PATH" MAX_JOBS=${MAX_JOBS:-$(nproc)} \
  "$VENV/bin/pip" install --quiet --disable-pip-version-check --no-build-isolation --editable '.[test]'
