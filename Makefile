# The same words as everywhere: make train, make test, make lint, make bench.

PYTHON ?= python3
VENV ?= .venv
CONFIG ?= train_config/esm2ae.yaml
SERVE_CONFIG ?= train_config/serve.yaml
ARGS ?=
SBOM ?= esmeray.cdx.json
# Tests run in two processes, a file's in one of them, and those of a fixture that takes long to start, by and in the order
# of tests/conftest.py.
SPREAD ?= -n 2 --dist loadfile --no-loadscope-reorder
BIN := $(VENV)/bin
TORCH := $(shell sed -n 's/^torch==//p' requirements.txt)
# No test or training run may ask the hub or W&B for anything that was not asked for.
export HF_HUB_DISABLE_TELEMETRY := 1
export RAY_USAGE_STATS_ENABLED := 0

.DEFAULT_GOAL := help
.PHONY: help install train serve test test-fast chaos lint size format bench lock sbom image docs clean

help:  ## what can be made
	@sed -n 's/^\([a-z-]*\):.*## /make \1|/p' $(MAKEFILE_LIST) | column -t -s '|'

# A Python that has torch already (the CPU build, say) lends it: nothing is downloaded twice.
$(BIN)/python:
	@if $(PYTHON) -c "import torch, sys; sys.exit(torch.__version__.split('+')[0] != '$(TORCH)')" 2>/dev/null; \
	then $(PYTHON) -m venv --system-site-packages $(VENV); \
	else $(PYTHON) -m venv $(VENV); fi

INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# The lock is complete, and every file of it is checked. torch is not in it, since each machine has a build of its own from an
# index of its own: requirements.txt brings it, and what that build pins.
LOCKED := $(INSTALL) --no-deps --require-hashes -r

# The command esmeray, from any folder; setuptools, which makes it, is in the lock: nothing is downloaded for it.
$(VENV)/.installed: requirements.lock requirements.txt pyproject.toml setup.py | $(BIN)/python
	$(LOCKED) requirements.lock
	$(INSTALL) -r requirements.txt
	$(INSTALL) --no-deps --no-build-isolation --editable .
	@touch $@

$(VENV)/.installed-dev: requirements-dev.lock $(VENV)/.installed
	$(LOCKED) requirements-dev.lock
	@touch $@

$(VENV)/.installed-bench: requirements-bench.lock $(VENV)/.installed-dev
	$(LOCKED) requirements-bench.lock
	@touch $@

install: $(VENV)/.installed  ## set up .venv

train: $(VENV)/.installed  ## train the ESM-2 autoencoder (CONFIG=FILE, ARGS="--section.key VALUE ...")
	$(BIN)/python train_ray.py --config $(CONFIG) $(ARGS)

serve: $(VENV)/.installed  ## serve models over HTTP (SERVE_CONFIG=FILE, ARGS="--serve.models RUN ...")
	$(BIN)/python serve_ray.py --config $(SERVE_CONFIG) $(ARGS)

# Two processes of as many threads as there are cores wait for each other: tests of models took twice the CPU time.
test test-fast: export OMP_NUM_THREADS := 1

test: $(VENV)/.installed-dev  ## all tests
	$(BIN)/python -m pytest $(SPREAD) $(ARGS)

test-fast: $(VENV)/.installed-dev  ## the tests that are not marked slow
	$(BIN)/python -m pytest $(SPREAD) -m "not slow" $(ARGS)

chaos: $(VENV)/.installed-dev  ## faults at random, as root, compared with undisturbed runs (ARGS="--minutes 15 --seed 0")
	$(BIN)/python -m tests.chaos $(ARGS)

# The package as a wheel has it, of links: for what reads code and does not run it.
PACKAGE := $(VENV)/package
$(PACKAGE): $(VENV)/.installed $(wildcard */__init__.py)
	mkdir -p $@/esmeray
	ln -sfn $(CURDIR)/esmeray/* $(patsubst %/__init__.py,$(CURDIR)/%,$(filter-out esmeray/% tests/%,$(wildcard */__init__.py))) $@/esmeray
	@touch $@

lint: $(VENV)/.installed-dev $(PACKAGE)  ## style, types and the direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	cd $(PACKAGE) && $(CURDIR)/$(BIN)/mypy --config-file $(CURDIR)/pyproject.toml
	cd $(PACKAGE) && $(CURDIR)/$(BIN)/lint-imports --config $(CURDIR)/pyproject.toml

size:  ## statements of each room, modules, functions and imports beside their limits
	@$(PYTHON) .ci/size.py

format: $(VENV)/.installed-dev  ## put the code in form
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.installed  ## docs/config.md from the schema
	$(BIN)/python -m esmeray.tools.reference

bench: $(VENV)/.installed-bench  ## speed beside what people use today (ARGS="--quick" or names of stages)
	$(BIN)/python -m benchmarks $(ARGS)

# What torch's CUDA build brings along is left out with torch: it pins that itself, and a CPU machine must not install it.
# rfc3987-syntax (1.1) and its lark are an option of jsonschema that cyclonedx-bom brings: it parses its grammar whenever Ray is
# imported, 1.2 s in each process of a cluster, and nothing here checks an IRI.
lock: $(VENV)/.installed-dev  ## pin everything that requirements.txt, -dev.txt and -bench.txt bring along
	for name in requirements requirements-dev requirements-bench; do \
		$(BIN)/uv pip compile --quiet --universal --generate-hashes --python-version 3.11 --no-header --no-annotate $$name.txt \
		| awk '/^[^ ]/ {kept = /^nvidia-ml-py==/ || !/^(torch==|nvidia-|cuda-|triton==|rfc3987-syntax==|lark==)/} kept' \
		| sed '1i # Made by make lock from '$$name'.txt. Not to be edited.' > $$name.lock; done

sbom: $(VENV)/.installed-dev  ## esmeray.cdx.json: the locked packages with their hashes, in CycloneDX's format
	(cat requirements.lock; grep ^torch== requirements.txt) | $(BIN)/cyclonedx-py requirements --pyproject pyproject.toml \
		--output-reproducible --output-file $(SBOM) -

image:  ## build docker/Dockerfile without Docker, and run it (root, buildah, debootstrap; ARGS=FILE keeps it)
	docker/build $(ARGS)

clean:  ## remove the environment and caches, no run
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
