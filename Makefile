# Targets create .venv themselves, once. `make` alone lists them.
# The first that is at least 3.11.
PYTHON ?= $(shell for each in python3.11 python3; do $$each -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$each; break; }; done)
VENV := .venv
BIN := $(VENV)/bin
KUSTOMIZE ?= kubectl kustomize
STAMP := $(VENV)/.installed
# Tests that measure no time and start no services: several at once change nothing.
COMPUTING := tests/worker/model tests/worker/engine tests/worker/text tests/demo tests/lab/simulation
# Tests that strike whole clusters or measure: they take most of an hour, and need a machine that stands still for nobody else.
LABORATORY := tests/lab/chaos/test_laboratory.py tests/cluster/runbooks tests/lab/bench/test_router_command.py tests/hostile/test_flood.py \
    tests/lab/bench/engine tests/lab/bench/router tests/test_wheel.py
# Of fresh simulations in `make test-lab`.
MINUTES ?= 10
RESULT ?= benchmarks/results/$(shell uname -n).json
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help setup parts run test test-lab up bench chaos lint types protos manifests clean

help: ## Print the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

setup: $(STAMP) ## Create the virtual environment and the stubs

$(STAMP): pyproject.toml constraints.txt protos/generate.py $(wildcard protos/ryzanstein/v1/*.proto)
	@test -n "$(PYTHON)" || { echo "Python 3.11 or later is needed; set PYTHON=..."; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt torch==2.13.0 --editable '.[dev]'
	@touch $@

run: setup ## A two-node cluster, a conversation, a node killed mid-answer; ends by itself
	$(BIN)/ryzanstein demo

test: setup ## Pass the tests: those that only compute on every core, then those that need the machine to themselves
	@code=0; worse() { [ $$1 -le $$code ] || code=$$1; }; \
	$(BIN)/python -m pytest -n auto $(COMPUTING) || worse $$?; \
	$(BIN)/python -m pytest $(COMPUTING:%=--ignore=%) $(LABORATORY:%=--ignore=%) || worse $$?; \
	mkdir -p .pytest_cache; echo $$code > .pytest_cache/worst; exit $$code

test-lab: parts setup ## What takes long: every fault once, the runbooks, the benchmarks' own tests, ten minutes of fresh simulations
	@code=0; \
	$(BIN)/python -m pytest $(LABORATORY) || code=$$?; \
	$(BIN)/ryzanstein simulate --minutes $(MINUTES) || code=$$?; \
	exit $$code

parts: ## Install what tests and benchmarks start besides Python: Redis, nginx, haproxy, iproute2, nftables, prometheus (apt)
	bash .ci/parts

up: setup ## A local cluster that stays: HTTP 127.0.0.1:8000, gRPC 127.0.0.1:50051
	$(BIN)/ryzanstein up

chaos: parts setup ## Strike a cluster with every fault 30 times (an hour and a half at most) and write docs/failure-budget.md
	mkdir -p build
	$(BIN)/ryzanstein bench failover --runs 30 --json build/failover.json --report docs/failure-budget.md

bench: setup ## Time what must not become slower, into benchmarks/results/<host>.json (RESULT=FILE: there)
	$(BIN)/ryzanstein bench suite --json $(RESULT)

lint: setup ## ruff, import contracts, buf lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	@command -v npx >/dev/null || { echo "npx (Node.js) is needed for buf lint"; exit 1; }
	cd protos && npx --yes --package @bufbuild/buf@1.75.0 buf lint

types: setup ## mypy --strict
	$(BIN)/mypy

manifests: setup ## Render the Kubernetes manifests into build/manifests and validate them
	mkdir -p build/manifests
	$(KUSTOMIZE) k8s/base > build/manifests/base.yaml
	$(KUSTOMIZE) k8s/overlays/local-cpu > build/manifests/local-cpu.yaml
	$(BIN)/kubernetes-validate --strict --kubernetes-version 1.32 build/manifests/*.yaml

protos: ## Generate the stubs again
	$(BIN)/pip install --quiet --no-deps --editable .

clean: ## Remove what the targets made
	rm -rf $(VENV) build dist shared/ryzanstein/v1 .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache node_modules
