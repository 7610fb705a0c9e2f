# Targets create .venv themselves, once. `make` alone lists them.
# The first that is at least 3.11.
PYTHON ?= $(shell for each in python3.11 python3 python3.12 python3.13; do $$each -c "import sys; sys.exit(sys.version_info < (3, 11))" 2>/dev/null && { echo $$each; break; }; done)
VENV := .venv
BIN := $(VENV)/bin
KUSTOMIZE ?= kubectl kustomize
# What an environment is made of; a newer one of these means another installation.
SOURCES := pyproject.toml constraints.txt clients/python/pyproject.toml protos/generate.py .ci/install $(wildcard protos/ryzanstein/v1/*.proto)
# Tests at once: one per core.
JOBS ?= auto
# Tests that inject faults into whole clusters or measure: they take most of an hour, on a machine without other load.
LABORATORY := tests/lab/chaos/test_laboratory.py tests/cluster/runbooks tests/lab/bench/test_router_command.py tests/hostile/test_flood.py tests/hostile/test_sockets.py \
    tests/lab/bench/engine tests/lab/bench/router tests/test_wheel.py tests/worker/model/kernels/test_aarch64.py \
    tests/worker/model/gguf/judges tests/cluster/real_model tests/cluster/test_page_rolling.py tests/cluster/test_page_tiers.py tests/lab/constraints tests/cluster/browser tests/cluster/test_lm_eval.py \
    tests/cluster/test_late_faults.py tests/cluster/agents
# The machines that a newcomer may have: `make test-machines`.
APART := $(LABORATORY) tests/machines tests/gpu tests/worker/engines/real_vllm
PYTEST = $(BIN)/python -m pytest -n $(JOBS) --dist loadfile $(APART:%=--ignore=%)
OUTCOME = || code=$$?; mkdir -p .pytest_cache; echo $${code:-0} > .pytest_cache/outcome; exit $${code:-0}
RESUMING := -p tests.resuming --resume build/lab.passed
# Duration of the simulations in `make test-lab`.
MINUTES ?= 10
RESULT ?= lab/benchmarks/results/$(shell uname -n).json
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help setup dev parts run test test-long test-all test-machines test-engines test-sanitizers gpu coverage test-lab up bench chaos lint types audit protos manifests clean

help: ## Print the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-15s %s\n", $$1, $$2}'

setup: $(VENV)/.run ## Create the virtual environment, the stubs and, once a machine, the kernels
	@$(BIN)/python -P -m ryzanstein.worker.kernels --quiet || true

dev: $(VENV)/.dev setup ## The same, with what tests, lint and types need

$(VENV)/.run $(VENV)/.dev: $(SOURCES)
	@test -n "$(PYTHON)" || { echo "Python 3.11 or later is required; set PYTHON=..."; exit 1; }
	@PYTHON="$(PYTHON)" bash .ci/install $(patsubst .%,%,$(notdir $@))

run: setup ## Run the demo: two nodes, a conversation, a node killed during an answer
	$(BIN)/ryzanstein demo

test: dev ## The tests of every rule and one of each kind with real processes, within 15 minutes (JOBS=N: N at once)
	@bash .ci/parts tests
	@$(PYTEST) -m "not long and not lab" $(OUTCOME)

test-long: dev parts ## The tests that `make test` leaves out because they take long (WITHIN=N: those that begin within N seconds)
	@$(PYTEST) $(WITHIN:%=-p tests.bounded --no-loadscope-reorder --within %) -m "long and not lab" $(OUTCOME)

test-all: test test-long ## Everything that must pass before a change lands, but the machines

test-machines: dev ## Try `run` and `up` on machines that a newcomer may have, and write docs/start/local.md (root)
	$(BIN)/python -m pytest tests/machines --timeout 600 --table docs/start/local.md

test-engines: dev ## Nodes beside a real vLLM, on CPUs (3.5 GB to fetch once, 10 to 20 minutes)
	PYTHON=$(PYTHON) bash .ci/parts vllm
	$(BIN)/python -m pytest tests/worker/engines/real_vllm --timeout 600

test-sanitizers: dev ## Tests of the kernels and of steps in C under the sanitizers of addresses and of undefined behaviour (GCC, 10 minutes)
	bash .ci/sanitizers

gpu: ## Whatever needs a GPU, on a machine that has one
	PYTHON=$(PYTHON) bash .ci/gpu

coverage: dev ## Run the tests with line coverage, of the services' processes too
	$(PYTEST) --cov --cov-report=term:skip-covered

test-lab: parts dev ## Every fault once, runbooks, real models and clients, ten minutes of simulations and of a soak; continues after a stop
	bash .ci/parts emulation
	PYTHON=$(PYTHON) bash .ci/parts judges
	PYTHON=$(PYTHON) bash .ci/parts lm-eval
	bash .ci/parts browser
	bash .ci/parts tokenizers
	PYTHON=$(PYTHON) bash .ci/parts clients
	PYTHON=$(PYTHON) bash .ci/parts load
	@code=0; \
	$(BIN)/python -m pytest $(RESUMING) --session-timeout 3600 $(LABORATORY) || code=$$?; \
	$(PYTEST) $(RESUMING) --session-timeout 1800 -m lab || code=$$?; \
	$(BIN)/ryzanstein simulate --minutes $(MINUTES) || code=$$?; \
	$(BIN)/ryzanstein bench soak --minutes $(MINUTES) --json build/soak.json || code=$$?; \
	exit $$code

parts: ## Install the programs that tests and benchmarks use: Redis, nginx, haproxy, iproute2, nftables, prometheus, tmux (apt)
	bash .ci/parts

up: setup ## Run a local cluster until Ctrl-C: HTTP 127.0.0.1:8000, gRPC 127.0.0.1:50051
	$(BIN)/ryzanstein up

chaos: parts dev ## Inject faults for an hour, each up to 30 times, and write docs/internals/log/failure-budget.md; continues after a stop
	mkdir -p build
	$(BIN)/ryzanstein bench failover --runs 30 --minutes 60 --progress build/failover.jsonl --json build/failover.json --report docs/internals/log/failure-budget.md

bench: dev ## Run the benchmark suite; writes lab/benchmarks/results/<host>.json, or RESULT=FILE
	$(BIN)/ryzanstein bench suite --json $(RESULT)

lint: dev ## ruff, import contracts, buf lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	@command -v npx >/dev/null || { echo "npx (Node.js) is required for buf lint"; exit 1; }
	cd protos && npx --yes --package @bufbuild/buf@1.75.0 buf lint

types: dev ## mypy --strict
	$(BIN)/mypy

audit: ## Look for vulnerabilities of dependencies, risky calls and secrets (VULNERABILITIES=skip leaves out the first)
	@PYTHON="$(PYTHON)" bash .ci/audit

manifests: dev ## Render the Kubernetes manifests into build/manifests and validate them
	mkdir -p build/manifests
	$(KUSTOMIZE) k8s/base > build/manifests/base.yaml
	$(KUSTOMIZE) k8s/overlays/local-cpu > build/manifests/local-cpu.yaml
	$(KUSTOMIZE) k8s/overlays/gpu > build/manifests/gpu.yaml
	$(BIN)/kubernetes-validate --strict --kubernetes-version 1.32 build/manifests/*.yaml

protos: ## Regenerate the stubs
	$(BIN)/pip install --quiet --no-deps --editable ./clients/python

clean: ## Remove everything that the targets created
	rm -rf $(VENV) build dist clients/python/ryzanstein/v1 .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache node_modules
