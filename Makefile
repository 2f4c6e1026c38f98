# `make demo` and `make test` set up all they need: .venv, and for tests in real engines .venv-vllm and .venv-sglang.
# The variables that this reads are at the top of scripts/setup.sh and scripts/setup_engine.sh.
SHELL := bash
.DEFAULT_GOAL := help

PY := $(or $(DFLASH2_PYTHON),.venv/bin/python)
HAS_GPU := $(shell nvidia-smi -L 2>/dev/null | grep -c GPU)
CORES := $(shell getconf _NPROCESSORS_ONLN 2>/dev/null || echo 1)
# One test process for each core, with one thread: more threads than free cores slow small models down many times over.
JOBS ?= $(shell echo $$(($(CORES) > 8 ? 8 : $(CORES))))
PYTEST := OMP_NUM_THREADS=$(or $(OMP_NUM_THREADS),1) $(PY) -m pytest -n $(JOBS) --dist loadfile
# Half the logical cores: two that share a physical one decode no faster than one (10.1 tok/s with 1 thread, 9.4 with 2).
DEMO_THREADS := $(or $(OMP_NUM_THREADS),$(shell echo $$((($(CORES) + 1) / 2))))

.PHONY: help setup setup-demo setup-test demo test lint types test-interpreter test-code test-vllm test-sglang test-fast format docs clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: setup-test ## make .venv with all that development needs

setup-demo:
	@scripts/setup.sh demo

setup-test:
	@scripts/setup.sh test

demo: setup-demo ## draft for a real model and show that the output is the model's own
	@OMP_NUM_THREADS=$(DEMO_THREADS) $(PY) -m dflash2 demo

test: ## lint, types and all tests; real engines' environments are installed beside the tests of the code
	@scripts/test.sh

lint: setup-test ## ruff: rules and format
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

types: setup-test ## mypy
	$(PY) -m mypy

test-interpreter: setup-test ## on a GPU machine, the kernels in Triton's interpreter too
ifneq ($(HAS_GPU),0)
	TRITON_INTERPRET=1 CUDA_VISIBLE_DEVICES= $(PYTEST) -m triton
endif

test-code: setup-test ## all tests; without a GPU the kernels run in Triton's interpreter
	$(PYTEST)

test-vllm: ## tests in real vLLM engines on the CPU, in an environment of their own (.venv-vllm, 3.5 GB)
	scripts/setup_engine.sh vllm
	OMP_NUM_THREADS=1 $(or $(DFLASH2_VLLM_PYTHON),.venv-vllm/bin/python) -m pytest tests/adapters/in_vllm

test-sglang: ## tests in real SGLang engines on the CPU, in an environment of their own (.venv-sglang, 3.3 GB)
	scripts/setup_engine.sh sglang
	OMP_NUM_THREADS=1 $(or $(DFLASH2_SGLANG_PYTHON),.venv-sglang/bin/python) -m pytest tests/adapters/in_sglang

test-fast: setup-test ## the tests that take seconds
	$(PYTEST) -m "not slow"

format: setup-test ## let ruff repair and format
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

docs: setup-test ## write the API reference and the picture of docs/ again
	$(PY) scripts/api_reference.py
	$(PY) scripts/draw_concepts.py

clean: ## remove .venv, caches and builds
	rm -rf .venv .venv-vllm .venv-sglang .venv*.lock build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
