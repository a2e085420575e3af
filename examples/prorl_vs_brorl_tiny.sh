#!/usr/bin/env bash
# The paper's comparison at small scale: N = 16 until it stalls, then from there N = 16 or N = 512 for the same time.
# Usage: [RUN=directory] [PROCESSES=2] bash examples/prorl_vs_brorl_tiny.sh [--seconds S] [--seeds ...] [section.key=value ...]
set -euo pipefail
cd "$(dirname "$0")/.."

if [ -x .venv/bin/brorl ]; then PATH="$PWD/.venv/bin:$PATH"; fi
exec python tools/prorl_vs_brorl.py examples/prorl_vs_brorl_tiny.toml "${RUN:-runs/prorl_vs_brorl_tiny}" \
  --processes "${PROCESSES:-2}" "$@"
