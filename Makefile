# Everything runs in .venv, which the first target that needs it makes. PYTHON chooses the interpreter.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# With what tests, lint and documentation need besides.
DEV := $(VENV)/.installed-dev

.PHONY: quickstart test-fast test check docs bench torture sanitize wheel test-wheel test-vllm test-megatron-next gpu-check clean

quickstart: $(INSTALLED)  ## the main job on this machine: a tiny model, 512 rollouts per prompt, a plot and a summary
	PATH="$(CURDIR)/$(BIN):$$PATH" bash examples/brorl_tiny.sh

# Of a file all tests run in one process, which keeps what they share; WORKERS files at a time.
WORKERS ?= 2
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

test-fast: $(DEV)  ## one or two processes and one whole run: about 3 minutes on two cores
	$(PYTEST) -m "not slow"

test: $(DEV)  ## every test that this machine can run
	$(PYTEST)

check: $(DEV)  ## lint, format, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(DEV)  ## the documentation as a site, in site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

bench: $(INSTALLED)  ## speed, as ratios measured in one run
	@for tool in $(wildcard benchmarks/bench_*.py); do echo "== $$tool"; $(BIN)/python $$tool --quick || exit 1; done

KILLS ?= 60
FAULTS ?= 60
SEED ?= 1
torture: $(DEV)  ## runs that are killed or refused by the disk, and started again, end with the same bits
	$(BIN)/python -W ignore tests/torture/trials.py --kills $(KILLS) --faults $(FAULTS) --seed $(SEED)

test-vllm: $(DEV)  ## the engine tests on vLLM itself, which gets an environment of its own (3.5 GB)
	PYTHON="$(PYTHON)" VENV="$(VENV)" bash tools/test_vllm.sh

test-megatron-next: $(DEV)  ## tests/dist, models, checkpoints and whole runs on Megatron-Core 0.19
	VENV="$(VENV)" WORKERS="$(WORKERS)" bash tools/test_megatron_next.sh

gpu-check: $(DEV)  ## check kernels, training and engines on a GPU, in half an hour: tables in gpu_check.md
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python tools/gpu_check.py

sanitize: $(DEV)  ## the op tests under the address and undefined-behaviour sanitizers
	PYTHON="$(CURDIR)/$(BIN)/python" bash tools/sanitize.sh

wheel: $(INSTALLED)  ## a wheel for any processor of this kind, for this Python and this torch, in dist/
	rm -rf dist build/lib* build/bdist*
	BRORL_NATIVE=0 MAX_JOBS=$${MAX_JOBS:-$$(nproc)} $(BIN)/pip wheel --quiet --no-deps --wheel-dir dist .

test-wheel: wheel  ## that wheel in an empty environment: every command, and the op tests on each set of kernels
	PYTHON="$(CURDIR)/$(BIN)/python" bash tools/test_wheel.sh

clean:
	rm -rf $(VENV) build dist site *.egg-info megatron_brorl/*.so .pytest_cache .mypy_cache .ruff_cache

# A machine with a CUDA driver keeps the torch it has (as in an NGC container); any other gets the CPU build, because
# an open version range would bring gigabytes of CUDA libraries.
# The sources of the extension are prerequisites, so that an edit builds it again.
$(INSTALLED): pyproject.toml setup.py tools/install.sh $(wildcard csrc/* csrc/*/*)
	PYTHON="$(PYTHON)" VENV="$(VENV)" bash tools/install.sh
	touch $@

$(DEV): $(INSTALLED)
	VENV="$(VENV)" bash tools/install.sh dev
	touch $@
