#!/usr/bin/env bash
# Create $VENV and install the project into it. With the argument "dev", add the tools for tests, lint and documentation
# to an existing environment. Called by the Makefile.
#   PYTHON, VENV   interpreter (python3) and folder (.venv)
#   BRORL_TORCH    arguments for pip to install torch on a machine without CUDA, instead of the default CPU build:
#                  a wheel, or "--index-url URL torch==VERSION"
set -euo pipefail
PYTHON=${PYTHON:-python3}
VENV=${VENV:-.venv}
CPU_INDEX=https://download.pytorch.org/whl/cpu
# Only CPU builds have "+cpu" in their version. "torch==2.13.0" could install a CUDA build with gigabytes of libraries.
CPU_TORCH=torch==2.13.0+cpu

refuse() {
  echo "install: $1" >&2
  exit 2
}
say() { echo "install: $1"; }
# --quiet twice shows only errors, because pip's warnings are about its own configuration.
pip_install() {
  "$VENV/bin/pip" install --quiet --quiet --disable-pip-version-check "$@"
}
# Print the requirements of groups or extras of pyproject.toml, one per line, without torch.
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
# Print the version of torch in the environment and its CUDA version or "none"; nothing if torch is missing. torch is not
# imported, because its dependencies may not be installed yet.
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
  read -r version _ < <(torch_of_venv) || refuse "$VENV has no torch: remove $VENV and run make again"
  listed=$(requirements test docs)
  mapfile -t wanted <<<"$listed"
  pip_install "torch==$version" "${wanted[@]}"
  exit
fi

"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
  refuse "$("$PYTHON" --version) is too old: set PYTHON to a Python of 3.10 or newer"

if "$PYTHON" -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
  say "1/4 CUDA found: $VENV uses the installed torch"
  "$PYTHON" -m venv --system-site-packages "$VENV"
  read -r version _ < <(torch_of_venv) ||
    refuse "$VENV does not see the torch of $PYTHON, a virtual environment: set PYTHON to the Python it was made with"
else
  say "1/4 no CUDA found: installing PyTorch's CPU build into $VENV (0.75 GB)"
  export BRORL_CUDA=${BRORL_CUDA:-0} # do not build for a CUDA toolkit without a GPU
  "$PYTHON" -m venv "$VENV"

  # The dependencies of torch are installed below, from the index that pip is configured for.
  BRORL_TORCH=${BRORL_TORCH:-}
  if [[ -n $BRORL_TORCH ]]; then
    read -ra wanted <<<"$BRORL_TORCH"
    pip_install --no-deps "${wanted[@]}" || refuse "pip cannot install BRORL_TORCH=$BRORL_TORCH (see its messages above)"
  else
    pip_install --no-deps --retries 1 --index-url "$CPU_INDEX" "$CPU_TORCH" 2>"$VENV/torch.log" ||
      pip_install --no-deps "$CPU_TORCH" 2>>"$VENV/torch.log" ||
      refuse "no $CPU_TORCH for $("$PYTHON" --version) in $CPU_INDEX or pip's own index ($VENV/torch.log): set \
BRORL_TORCH to the wheel of a CPU build or to \"--index-url URL torch==VERSION\", or PYTHON to another Python"
  fi

  read -r version cuda < <(torch_of_venv) || refuse "BRORL_TORCH=$BRORL_TORCH did not install torch"
  [[ $cuda == none ]] ||
    refuse "torch $version is a build for CUDA $cuda, which this machine does not have: set BRORL_TORCH to a CPU build"
fi

# The extension is built without isolation, so that it can be rebuilt offline after an edit. The build requirements must
# therefore be installed. Naming torch installs its dependencies and keeps its version.
say "2/4 dependencies of torch $version and of the build"
pip_install "torch==$version" numpy 'setuptools>=77' ninja 'tomli; python_version < "3.11"'

# Install the requirements before the project itself, so that no step is silent for long.
listed=$(requirements run quickstart)
mapfile -t wanted <<<"$listed"
say "3/4 ${#wanted[@]} packages and their dependencies (0.8 GB)"
pip_install "torch==$version" "${wanted[@]}"

say "4/4 compiling csrc/ for this processor (about two minutes on two cores)"
PATH="$(cd "$VENV/bin" && pwd):$PATH" BRORL_NATIVE=${BRORL_NATIVE:-1} MAX_JOBS=${MAX_JOBS:-$(nproc)} \
  pip_install --no-build-isolation --no-deps --editable .
say "done"
