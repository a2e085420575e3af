#!/usr/bin/env bash
# Make $VENV and install the project into it; with the argument "dev": add the tools for tests, lint and documentation
# to an environment that has the project. Called by the Makefile.
#   PYTHON, VENV   interpreter (python3) and folder (.venv)
#   BRORL_TORCH    where there is no CUDA: what pip installs as torch, instead of the CPU build of PyTorch's or pip's own
#                  index: a wheel of a CPU build, or "--index-url URL torch==VERSION"
set -euo pipefail
PYTHON=${PYTHON:-python3}
VENV=${VENV:-.venv}
CPU_INDEX=https://download.pytorch.org/whl/cpu
# The version's "+cpu" is that of PyTorch's CPU builds alone: an index that has none of them finds nothing, where
# "torch==2.13.0" would be answered with a CUDA build and its gigabytes of libraries.
CPU_TORCH=torch==2.13.0+cpu

refuse() {
  echo "install: $1" >&2
  exit 2
}
say() { echo "install: $1"; }
# Twice quiet: errors alone. What pip warns about is its own configuration.
pip_install() {
  "$VENV/bin/pip" install --quiet --quiet --disable-pip-version-check "$@"
}
# The requirements of a group or extra of pyproject.toml, one per line, without torch, which is chosen below.
requirements() {
  "$VENV/bin/python" - "$(dirname "$0")/../pyproject.toml" "$@" <<'EOF'
import sys

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib
with open(sys.argv[1], "rb") as file:
    declared = tomllib.load(file)
groups = {**declared["dependency-groups"], **declared["project"]["optional-dependencies"]}
print("\n".join(line for name in sys.argv[2:] for line in groups[name] if not line.startswith("torch>")))
EOF
}
# The environment's torch: its version, and its CUDA version or "none". Without importing it, which its dependencies and
# libraries would have to be there for. Nothing where there is none.
torch_of_venv() {
  "$VENV/bin/python" - <<'EOF'
import importlib.metadata, importlib.util, runpy
spec = importlib.util.find_spec("torch")
if spec:
    built = runpy.run_path(spec.submodule_search_locations[0] + "/version.py")
    print(importlib.metadata.version("torch"), built.get("cuda") or "none")
EOF
}

if [[ ${1:-} == dev ]]; then
  say "tools for tests, lint and documentation (0.2 GB)"
  read -r version _ < <(torch_of_venv) || refuse "$VENV has no torch: make makes it anew once it is removed"
  listed=$(requirements test docs)
  mapfile -t wanted <<<"$listed"
  pip_install "torch==$version" "${wanted[@]}"
  exit
fi

"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
  refuse "$("$PYTHON" --version) is too old: set PYTHON to a Python of 3.10 or newer"

if "$PYTHON" -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
  say "1/4 CUDA found: $VENV uses the torch that is installed"
  "$PYTHON" -m venv --system-site-packages "$VENV"
  read -r version _ < <(torch_of_venv) ||
    refuse "$VENV does not see the torch of $PYTHON, a virtual environment: set PYTHON to the Python it was made with"
else
  say "1/4 no CUDA: $VENV gets PyTorch's CPU build (0.75 GB on the disk)"
  export BRORL_CUDA=${BRORL_CUDA:-0} # a toolkit alone runs nothing
  "$PYTHON" -m venv "$VENV"

  # Its dependencies come below, from the index that pip is configured for.
  BRORL_TORCH=${BRORL_TORCH:-}
  if [[ -n $BRORL_TORCH ]]; then
    read -ra wanted <<<"$BRORL_TORCH"
    pip_install --no-deps "${wanted[@]}" || refuse "pip cannot install BRORL_TORCH=$BRORL_TORCH (it says why above)"
  else
    pip_install --no-deps --retries 1 --index-url "$CPU_INDEX" "$CPU_TORCH" 2>"$VENV/torch.log" ||
      pip_install --no-deps "$CPU_TORCH" 2>>"$VENV/torch.log" ||
      refuse "no $CPU_TORCH for $("$PYTHON" --version) in $CPU_INDEX or pip's own index ($VENV/torch.log): set \
BRORL_TORCH to the wheel of a CPU build or to \"--index-url URL torch==VERSION\", or PYTHON to another Python"
  fi

  read -r version cuda < <(torch_of_venv) || refuse "BRORL_TORCH=$BRORL_TORCH has brought no torch"
  [[ $cuda == none ]] ||
    refuse "torch $version is a build for CUDA $cuda, which this machine has not: set BRORL_TORCH to a CPU build"
fi

# For this processor alone, and without an environment of pip's own for the build: after an edit of csrc/ it builds
# again without a network. What the build needs is then ours to install. Naming torch brings the dependencies it came
# without, and leaves it as it is.
say "2/4 what torch $version and the build need"
pip_install "torch==$version" numpy 'setuptools>=77' ninja 'tomli; python_version < "3.11"'

# Apart from the project itself, so that neither step is silent for long.
listed=$(requirements run)
mapfile -t wanted <<<"$listed"
say "3/4 ${#wanted[@]} packages that runs need, and what they need (0.8 GB)"
pip_install "torch==$version" "${wanted[@]}"

say "4/4 compiling csrc/ for this processor (about two minutes on two cores)"
PATH="$(cd "$VENV/bin" && pwd):$PATH" BRORL_NATIVE=${BRORL_NATIVE:-1} MAX_JOBS=${MAX_JOBS:-$(nproc)} \
  pip_install --no-build-isolation --no-deps --editable .
say "done"
