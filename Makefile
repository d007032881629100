# All commands for developers. A fresh clone needs only Python 3.11 or 3.12: each target first creates .venv (a few
# minutes, once). `make PYTHON=/path/to/python3.12 install` chooses another Python.
.DEFAULT_GOAL := help
.PHONY: help install install-cuda install-sglang install-unit demo unit types test test-slow test-presets test-hosts sweep sweep-part test-extras test-sglang test-py312 test-contracts refresh-contracts lint bench docs clean

# If this were set, every process of a test or run would compile mrl's modules again.
unexport PYTHONDONTWRITEBYTECODE

# An existing environment keeps its Python; otherwise use the first one that runs and can create environments.
SUPPORTED := import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))
PYTHON ?= $(shell for python in .venv/bin/python python3.11 python3.12 python3; do \
            if $$python -c '$(SUPPORTED)' >/dev/null 2>&1; then echo $$python; break; fi; done)
BIN := .venv/bin
PYTHON312 ?= python3.12

help: ## print this list
	@sed -n 's/^\([a-z0-9-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

# $(call environment,NAME): create the environment NAME, or update it.
define environment
	@python='$(PYTHON)'; if [ -z "$$python" ]; then \
	  echo "No Python 3.11 or 3.12 with venv found. Install one, or set PYTHON: make PYTHON=/path/to/python3.12 $(MAKECMDGOALS)" >&2; \
	  exit 1; fi; "$$python" -I launch/install.py $(1)
endef

install: ## create .venv with the whole CPU stack; does nothing if it is complete
	$(call environment,)

install-cuda: ## create .venv-cuda for NVIDIA GPUs; needs Python 3.12, a driver 580 or later (or DRIVER=elsewhere), a C++ compiler
	@$(PYTHON312) -I launch/install.py .venv-cuda $(DRIVER)

install-sglang: install ## create .venv-sglang, for rollout.engine=sglang: 1.4 GB next to .venv
	$(call environment,.venv-sglang)

demo: install ## train a small model on this machine
	@$(BIN)/mrl demo

install-unit:
	$(call environment,.venv-unit)

UNIT := config cli algos
UNIT_OF_MODELS := data models plan protocol
UNIT_TESTS := PYTHONPATH=$(CURDIR) MRL_ALGO_CASES=50 MRL_FUZZ_S=0.3 .venv-unit/bin/python -m pytest -q -m "not slow and not needs"
unit: install-unit ## the quick tests without Ray, Megatron and vLLM, in an environment without them: a minute
	@output=$$(mktemp); \
	  $(UNIT_TESTS) $(UNIT_OF_MODELS:%=tests/%) >$$output 2>&1 & models=$$!; \
	  $(UNIT_TESTS) $(UNIT:%=tests/%); others=$$?; \
	  wait $$models; models=$$?; cat $$output; rm $$output; exit $$((models | others))

JOBS := 2
PARALLEL = $(if $(filter-out 1,$(JOBS)),-n $(JOBS) --dist loadfile)
test: install ## all tests except slow ones and `make lint`'s, two files at a time (JOBS=1: one); SKIP_UNIT=1: not `make unit`'s
	MRL_SKIP_UNIT=$(SKIP_UNIT) MRL_TEST_BUDGETS=1 $(BIN)/python -m pytest $(PARALLEL) -m "not slow" --ignore=tests/test_architecture.py

test-slow: install ## the slow tests, two files at a time (JOBS=1: one); HALF=commit (or 1/2): every second file
	MRL_SLOW_HALF=$(HALF) $(BIN)/python -m pytest $(PARALLEL) -m "slow and not on_demand and not sglang" --durations=20

test-presets: install ## every preset's twin: the same switches on a small model, compared with a plain run
	$(BIN)/python -m pytest tests/presets

test-hosts: install ## runs over hosts with separate addresses, in network namespaces: needs root or user namespaces
	$(BIN)/python -m pytest tests/hosts

sweep: install ## tests too long for each change: every ending at every moment, every write, all layouts and twins; four hours
	MRL_SWEEP_RECORD=1 $(BIN)/python -m pytest -m on_demand --ignore=tests/contracts
	$(BIN)/python -m tests.endings.endings

PART := commit
sweep-part: install ## one twelfth of the sweep, chosen by the commit (or PART=3/12), in 3 minutes (MINUTES=3)
	MRL_SWEEP_PART=$(PART) MRL_SWEEP_MINUTES=$(or $(MINUTES),3) MRL_SWEEP_RECORD=1 $(BIN)/python -m pytest -m on_demand --ignore=tests/contracts

test-extras: install ## the tests of optional features, with all optional packages in .venv-extras
	@cmp -s requirements-extras.txt .venv-extras/complete || { rm -rf .venv-extras && $(BIN)/python -m pip install --quiet --no-deps \
	  --disable-pip-version-check --target .venv-extras --requirement requirements-extras.txt \
	  && cp requirements-extras.txt .venv-extras/complete; }
	PYTHONPATH=.venv-extras $(BIN)/python -m pytest tests/rewards/test_functions.py tests/data/test_reasoning_gym.py tests/observe/test_trackers.py tests/agents/test_frameworks.py
	TRITON_INTERPRET=1 PYTHONPATH=.venv-extras $(BIN)/python -m pytest tests/engine/test_delta_kernels.py

test-sglang: install-sglang ## SGLang as an engine: the conformance of engines, texts that stop, a run
	$(BIN)/python -m pytest -m "sglang and not on_demand" tests/rollout tests/trainer/test_sglang_run.py

test-py312: ## parity table, engine and twins of presets with Python 3.12, megatron-core 0.19, torch for CUDA
	@$(PYTHON312) -I launch/install.py .venv-py312
	.venv-py312/bin/python -m pytest tests/engine tests/models tests/verify tests/presets/test_training.py
	.venv-py312/bin/python benchmarks/parity.py --json benchmarks/results/parity-py312.json

test-contracts: install ## what CUDA code needs from its libraries, checked in their sources from the package index
	$(BIN)/python -m pytest tests/contracts

refresh-contracts: install ## repeat these look-ups, and store them for use without the package index
	$(BIN)/python -m tests.contracts.refresh

lint: ## style, language and the rules of CONTRIBUTING.md, in a separate environment
	$(call environment,.venv-lint)
	.venv-lint/bin/ruff check .
	.venv-lint/bin/ruff format --check .
	.venv-lint/bin/hadolint Containerfile
	.venv-lint/bin/python -m pytest -q tests/test_architecture.py

types: install ## types
	$(BIN)/mypy

bench: install ## every benchmark in turn, in about half an hour; results in benchmarks/results
	$(BIN)/python benchmarks/everything.py

docs: install ## regenerate the parts of the documentation that follow from the code
	$(BIN)/python -m tests.docs.generate
	$(BIN)/python -m tests.launch.examples

clean: ## remove .venv and every cache
	rm -rf .venv .venv-lint .venv-unit .venv-py312 .venv-cuda .venv-extras .venv-sglang .pytest_cache .ruff_cache .mypy_cache .hypothesis build ./*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
