#!/usr/bin/env bash
# Run the tests that use Megatron-Core on version 0.19: tests/dist, models, checkpoints and whole runs. On Python 3.12 and
# newer the project's environment has that version. On an older Python a second environment extends the first one; pip
# must then ignore that Megatron-Core 0.19 declares Python 3.12. Called by `make test-megatron-next`.
#   VENV, NEXT   the project's environment (.venv) and the second one (.venv-megatron-next)
set -euo pipefail
cd "$(dirname "$0")/.."
VENV=${VENV:-.venv}
NEXT=${NEXT:-.venv-megatron-next}
PACKAGES=(megatron-core==0.19.2 triton==3.8.0)

version_of() { "$1/bin/python" -c 'from importlib.metadata import version; print(version("megatron-core"))'; }

if [[ $(version_of "$VENV") == 0.19.* ]]; then
  NEXT=$VENV
elif [[ ! -f $NEXT/.installed || $VENV/.installed-dev -nt $NEXT/.installed ]]; then
  rm -rf "$NEXT"
  "$VENV/bin/python" -m venv "$NEXT"
  site() { "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
  # Packages of the second environment take precedence over those of the first.
  echo "import site; site.addsitedir('$(site "$VENV")')" >"$(site "$NEXT")/project.pth"
  "$NEXT/bin/pip" install --quiet --disable-pip-version-check --ignore-requires-python --no-deps "${PACKAGES[@]}"
  # Tests start torchrun, which must use the Python of this environment.
  printf '#!%s\nfrom torch.distributed.run import main\nmain()\n' "$(realpath -s "$NEXT/bin/python")" >"$NEXT/bin/torchrun"
  chmod +x "$NEXT/bin/torchrun"
  touch "$NEXT/.installed"
fi

PATH="$(realpath "$VENV")/bin:$PATH" # for shellcheck
echo "test_megatron_next: Megatron-Core $(version_of "$NEXT")"
exec "$NEXT/bin/python" -m pytest -n "${WORKERS:-2}" --dist loadfile --no-loadscope-reorder \
  tests/dist tests/unit/models tests/unit/checkpoints tests/e2e "$@"
