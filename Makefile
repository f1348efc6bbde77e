# Two commands for a newcomer: `make demo` and `make test`. Everything runs in .venv, which is built once.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 4
SEED ?= $(shell date +%s)
MINUTES ?= 20
PYTEST_ARGS ?=
# Tests start hundreds of interpreters, which would all compile what they import.
unexport PYTHONDONTWRITEBYTECODE

bin := $(VENV)/bin
pip := $(bin)/python -m pip --disable-pip-version-check install -qq -c constraints.txt
pytest := $(bin)/python -m pytest

.PHONY: help env demo test proof explore findings release-check bench gpu docs lint types without-memory verdicts format clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' Makefile

# torch alone and first: its version is then settled, and nothing that needs "some torch" can bring another one.
$(VENV)/.torch: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 10) else "bagua_ref needs Python 3.10 or newer; use make PYTHON=...")'
	@echo "Creating $(VENV) and installing torch (a minute or two) ..."
	@$(PYTHON) -m venv $(VENV)
	@$(pip) --upgrade pip
	@$(pip) "$$(grep '^torch==' constraints.txt)"
	@touch $@

$(VENV)/.demo: $(VENV)/.torch pyproject.toml
	@echo "Installing bagua_ref and what the demo needs ..."
	@$(pip) -e '.[demo]'
	@touch $@

$(VENV)/.dev: $(VENV)/.demo
	@echo "Installing the development tools ..."
	@$(pip) -e '.[dev]'
	@touch $@

# The CUDA compiler as wheels, without a driver: what the kernels are compiled with in the proofs.
$(VENV)/.nvrtc: $(VENV)/.dev
	@echo "Installing NVRTC and CuPy ..."
	@$(pip) -e '.[nvrtc]'
	@touch $@

# The trainers and engines that tests/integrations runs in; torch stays as it is. timm is in a directory of its own, as the
# torchvision that it needs cannot be imported beside a torch for CPUs only, and all the others import it if they find it.
$(VENV)/.trainers: $(VENV)/.dev src/bagua_ref/integrations/tested.txt
	@echo "Installing Lightning, accelerate, transformers, Ray and timm ..."
	@$(pip) -e '.[trainers]'
	@rm -rf $(VENV)/timm
	@$(pip) --no-deps --target $(VENV)/timm timm torchvision
	@touch $@

env: $(VENV)/.dev  ## build .venv with everything for development
	@echo "Ready: source $(bin)/activate"

demo: $(VENV)/.demo  ## train on handwritten digits with every algorithm, 4 processes; writes demo-report/index.html
	@$(bin)/bagua-ref demo

test: $(VENV)/.dev  ## everything that must be green: style, types, docs, examples, properties (quick profile)
	@$(MAKE) --jobs=4 --output-sync --no-print-directory lint types docs $(VENV)/.bytecode
	$(pytest) -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m "not proof" --shuffle=$(SEED) $(PYTEST_ARGS)

proof: $(VENV)/.nvrtc $(VENV)/.trainers $(VENV)/.peers  ## the slow proofs that CI adds: properties with 100 inputs each, loops, planted faults
	$(pytest) -n $(WORKERS) --hypothesis-profile=proof --timeout=1800 property_tests $(PYTEST_ARGS)
	$(pytest) -n $(WORKERS) --dist worksteal -m proof --timeout=1800 -o norecursedirs=integrations tests $(PYTEST_ARGS)
	$(pytest) -n $(WORKERS) --dist worksteal tests/integrations $(PYTEST_ARGS)
	@$(MAKE) --jobs=2 --output-sync --no-print-directory without-memory verdicts

without-memory: $(VENV)/.dev
	BAGUA_REF_SHARED_MEMORY=0 $(pytest) -n $(WORKERS) --dist loadfile tests/test_gloo_training.py tests/test_uneven_gloo.py $(PYTEST_ARGS)

verdicts: $(VENV)/.peers
	PYTHONPATH=$(VENV)/peers $(bin)/python -m findings --check

explore: $(VENV)/.dev  ## search for failing inputs of all properties for MINUTES (20); replay with the SEED that it prints
	$(bin)/python property_tests/explore.py --minutes $(MINUTES) --seed $(SEED) --workers $(WORKERS)

# What findings/ is about, in a directory of its own.
$(VENV)/.peers: $(VENV)/.dev findings/requirements.txt
	@echo "Installing the peers of findings/ ..."
	@rm -rf $(VENV)/peers
	@$(pip) --no-deps --target $(VENV)/peers -r findings/requirements.txt
	@touch $@

findings: $(VENV)/.peers  ## judge living implementations (torch, torchft, Decent-DP, accelerate, hivemind, torchao), and write findings/results.json
	PYTHONPATH=$(VENV)/peers $(bin)/python -m findings

# Needs nothing of .venv: what it builds and installs is in folders of its own.
release-check:  ## build what would be released and try it as a user would, outside of this folder
	@$(PYTHON) tests/release_check.py

bench: $(VENV)/.dev  ## every comparison with a peer; one table and one JSON file each, then the figures of the docs
	@missed=0; for script in $(filter-out benchmarks/namespaces.py,$(shell grep -l '^if __name__' benchmarks/*.py)); do \
		echo "== $$script"; $(bin)/python "$$script" || missed=1; \
	done; \
	$(bin)/python docs/_generate.py && $(bin)/python docs/_plot.py && exit $$missed

# On a machine with a GPU the environment is often someone else's, so this takes the Python at hand unless .venv sees the GPU.
has_gpu = $(1) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null
# Only what imports with pytest, torch, CuPy and hypothesis alone; the samplers also want what contrib is installed with.
gpu_tests = tests/test_cuda_gpu.py tests/test_nccl.py tests/test_streams.py tests/test_backends.py tests/test_contract.py tests/test_ddp.py \
	property_tests/test_suites.py
gpu:  ## on a machine with a CUDA device: its tests, CUDA's own checkers where present, benchmarks/gpu_*.py; the log is gpu.log
	@if $(call has_gpu,$(bin)/python); then python=$(bin)/python; \
	elif $(call has_gpu,$(PYTHON)); then python=$(PYTHON); \
	else echo "make gpu: neither $(bin)/python nor $(PYTHON) has a torch that sees a CUDA device; nothing was run."; exit 1; fi; \
	export PYTHONPATH=src; more=; workers=; failed=; \
	if "$$python" -c 'import redis, xxhash' 2>/dev/null; then more="tests/test_samplers.py property_tests/test_samplers.py property_tests/test_contrib_suites.py"; \
	else echo "make gpu: without redis and xxhash the samplers are left out."; fi; \
	if "$$python" -c 'import xdist' 2>/dev/null; then workers="-n 8"; fi; \
	{ \
		"$$python" -m pytest -m gpu $$workers $(gpu_tests) $$more $(PYTEST_ARGS) || failed=1; \
		if command -v compute-sanitizer >/dev/null; then for tool in memcheck racecheck; do \
			compute-sanitizer --tool $$tool --error-exitcode 1 "$$python" -m pytest -q tests/test_cuda_gpu.py -k '(bytes or movement) and not 3000017' || failed=1; \
		done; else echo "make gpu: there is no compute-sanitizer here; memory and races were not checked on the card."; fi; \
		for benchmark in gpu_kernels gpu_training; do "$$python" benchmarks/$$benchmark.py || failed=1; done; \
		test -z "$$failed"; \
	} 2>&1 | tee gpu.log

docs: $(VENV)/.dev  ## build the documentation into site/, strictly
	NO_MKDOCS_2_WARNING=1 $(bin)/mkdocs build --strict

lint: $(VENV)/.dev
	$(bin)/ruff format --check .
	$(bin)/ruff check .

# While mypy leaves a core idle: otherwise each of the workers of `test` would compile all tests, and what they import.
$(VENV)/.bytecode: $(VENV)/.dev $(shell find src tests property_tests -name '*.py')
	@found=$$($(pytest) --collect-only --quiet) || { echo "$$found"; exit 1; }
	@touch $@

types: $(VENV)/.dev
	$(bin)/mypy --num-workers=2

format: $(VENV)/.dev  ## rewrite the code as `make lint` wants it
	$(bin)/ruff format .
	$(bin)/ruff check --fix .

clean:  ## remove what was built, .venv included
	rm -rf $(VENV) .tox .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist site demo-report
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
