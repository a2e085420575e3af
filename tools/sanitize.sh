#!/usr/bin/env bash
# Build csrc/ with the address and undefined-behaviour sanitizers in a copy and run the op tests with it.
# Called by `make sanitize`. Needs GCC with libasan; arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-$PWD/.venv/bin/python}
PATH="$(dirname "$PYTHON"):$PATH"
COPY=build/sanitize

asan=$(gcc -print-file-name=libasan.so)
cxx=$(gcc -print-file-name=libstdc++.so)
[[ "$asan" == /* ]] || {
  echo "sanitize: gcc has no libasan.so: install GCC's sanitizer library" >&2
  exit 2
}
rm -rf "$COPY"
mkdir -p "$COPY"
cp -r csrc megatron_brorl tests setup.py pyproject.toml README.md LICENSE "$COPY"
rm -f "$COPY"/megatron_brorl/*.so
cd "$COPY"
BRORL_SANITIZE=1 BRORL_NATIVE=1 BRORL_CUDA=0 "$PYTHON" setup.py --quiet build_ext --inplace
# Preload libstdc++ too, so that the sanitizer finds the real throw. Leaks are ignored, because Python leaks at exit.
export LD_PRELOAD="$asan:$cxx" ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1
PYTHONPATH=$PWD "$PYTHON" - <<'CHECK'
import torch
import megatron_brorl._C as extension
assert "build/sanitize" in extension.__file__, extension.__file__
CHECK
PYTHONPATH=$PWD "$PYTHON" -m pytest tests/ops --ignore tests/ops/test_cuda_compiles.py "$@"
