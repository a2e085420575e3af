# Everything runs in .venv, which the first target that needs it makes. PYTHON chooses the interpreter.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: quickstart test check bench sanitize clean

quickstart: $(INSTALLED)  ## the main job on this machine: a tiny model, 512 rollouts per prompt, a plot and a summary
	PATH="$(CURDIR)/$(BIN):$$PATH" bash examples/brorl_tiny.sh

test: $(INSTALLED)  ## all tests that this machine can run
	$(BIN)/python -m pytest

check: $(INSTALLED)  ## lint, format, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(INSTALLED)  ## speed, as ratios measured in one run
	@for tool in $(wildcard benchmarks/bench_*.py); do echo "== $$tool"; $(BIN)/python $$tool --quick || exit 1; done

sanitize: $(INSTALLED)  ## the op tests under the address and undefined-behaviour sanitizers
	PYTHON="$(CURDIR)/$(BIN)/python" bash tools/sanitize.sh

clean:
	rm -rf $(VENV) build dist *.egg-info megatron_brorl/*.so .pytest_cache .mypy_cache .ruff_cache

# A machine with a CUDA driver keeps the torch it has (as in an NGC container); any other gets the CPU build, because
# an open version range would bring gigabytes of CUDA libraries.
# The sources of the extension are prerequisites, so that an edit builds it again.
$(INSTALLED): pyproject.toml setup.py tools/install.sh $(wildcard csrc/* csrc/*/*)
	PYTHON="$(PYTHON)" VENV="$(VENV)" bash tools/install.sh
	touch $@
