# The same words as everywhere: make train, make test, make lint, make bench.

PYTHON ?= python3
VENV ?= .venv
CONFIG ?= esm2ae
SERVE_CONFIG ?= serve
ARGS ?=
SBOM ?= esmeray.cdx.json
# Tests run in two processes, spread and ordered by tests/conftest.py.
SPREAD ?= -n 2 --dist loadfile --no-loadscope-reorder
BIN := $(VENV)/bin
TORCH := $(shell sed -n 's/^torch==//p' requirements.txt)
# No test or training run may ask the hub or W&B for anything that was not asked for.
export HF_HUB_DISABLE_TELEMETRY := 1
export RAY_USAGE_STATS_ENABLED := 0

.DEFAULT_GOAL := help
.PHONY: help install train serve test test-fast test-nightly coverage chaos lint size format bench lock sbom image docs clean

help:  ## what can be made
	@sed -n 's/^\([a-z-]*\):.*## /make \1|/p' $(MAKEFILE_LIST) | column -t -s '|'

# A Python that has torch already (the CPU build, say) lends it: nothing is downloaded twice.
$(BIN)/python:
	@if $(PYTHON) -c "import torch, sys; sys.exit(torch.__version__.split('+')[0] != '$(TORCH)')" 2>/dev/null; \
	then $(PYTHON) -m venv --system-site-packages $(VENV); \
	else $(PYTHON) -m venv $(VENV); fi

# uv does not read the index from pip's configuration.
INDEX := $(or $(PIP_INDEX_URL),$(shell $(PYTHON) -m pip config get global.index-url 2>/dev/null))
ifneq ($(INDEX),)
export UV_DEFAULT_INDEX ?= $(INDEX)
endif
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# The locks are complete, and the hash of every file is checked. torch is not in them, since each machine has its own build from
# its own index: pip installs it by requirements.txt, with what that build pins.
LOCKED := $(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --require-hashes -r

# The editable package brings the command esmeray. setuptools, which builds it, is in the lock: nothing else is downloaded.
$(VENV)/.installed: requirements/requirements.lock requirements/uv.lock requirements.txt pyproject.toml | $(BIN)/python
	$(PIP) --no-deps --require-hashes -r requirements/uv.lock
	$(LOCKED) requirements/requirements.lock
	$(PIP) -r requirements.txt
	$(PIP) --no-deps --no-build-isolation --editable .
	@touch $@

$(VENV)/.installed-dev: requirements/dev.lock $(VENV)/.installed
	$(LOCKED) requirements/dev.lock
	@touch $@

$(VENV)/.installed-bench: requirements/bench.lock $(VENV)/.installed-dev
	$(LOCKED) requirements/bench.lock
	@touch $@

install: $(VENV)/.installed  ## set up .venv

train: $(VENV)/.installed  ## train the ESM-2 autoencoder (CONFIG=FILE, ARGS="--section.key VALUE ...")
	$(BIN)/python train_ray.py --config $(CONFIG) $(ARGS)

serve: $(VENV)/.installed  ## serve models over HTTP (SERVE_CONFIG=FILE, ARGS="--serve.models RUN ...")
	$(BIN)/python serve_ray.py --config $(SERVE_CONFIG) $(ARGS)

# Two processes of as many threads as there are cores wait for each other: tests of models took twice the CPU time.
test test-fast test-nightly coverage: export OMP_NUM_THREADS := 1

test: $(VENV)/.installed-dev  ## the tests that a change has to pass
	$(BIN)/python -m pytest $(SPREAD) -m "not nightly" $(ARGS)

test-fast: $(VENV)/.installed-dev  ## the same without tests that are marked slow
	$(BIN)/python -m pytest $(SPREAD) -m "not nightly and not slow" $(ARGS)

# With the programs and trained weights that results are compared with.
test-nightly: $(VENV)/.installed-bench  ## documented commands, random faults, further kill tests, other programs' results
	$(BIN)/python -m pytest $(SPREAD) -m nightly $(ARGS)

# Child processes are measured too (pyproject.toml).
coverage: $(VENV)/.installed-dev  ## the share of the lines of esmeray that the tests run, in percent
	$(BIN)/coverage run -m pytest $(SPREAD) -m "not nightly" $(ARGS)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report --format total

chaos: $(VENV)/.installed-dev  ## faults at random, as root, compared with undisturbed runs (ARGS="--minutes 15 --seed 0")
	$(BIN)/python -m tests.chaos $(ARGS)

# No text here has words of .ci/words.txt.
PLAIN := esmeray benchmarks tests docs README.md CONTRIBUTING.md

lint: $(VENV)/.installed-dev  ## check style, language, types and the direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python .ci/words.py $(PLAIN)
	$(BIN)/mypy
	$(BIN)/pyright
	$(BIN)/lint-imports

size:  ## count statements of each room, and compare code and tests with their limits
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
lock: $(VENV)/.installed-dev  ## pin everything that requirements.txt and requirements/*.txt bring along
	for file in requirements.txt requirements/uv.txt requirements/dev.txt requirements/bench.txt; do \
		$(BIN)/uv pip compile --quiet --universal --generate-hashes --python-version 3.11 --no-header --no-annotate $$file \
		| awk '/^[^ ]/ {kept = /^nvidia-ml-py==/ || !/^(torch==|nvidia-|cuda-|triton==|rfc3987-syntax==|lark==)/} kept' \
		| sed '1i # Made by make lock from '$$file'. Not to be edited.' > requirements/$$(basename $$file .txt).lock; done

sbom: $(VENV)/.installed-dev  ## esmeray.cdx.json: the locked packages with their hashes, in CycloneDX's format
	(cat requirements/requirements.lock; grep ^torch== requirements.txt) | $(BIN)/cyclonedx-py requirements --pyproject pyproject.toml \
		--output-reproducible --output-file $(SBOM) -

image:  ## build docker/Dockerfile without Docker, and run it (root, buildah, debootstrap; ARGS=FILE keeps it)
	docker/build $(ARGS)

clean:  ## remove the environment and caches, no run
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache .coverage .coverage.*
