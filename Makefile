# Two commands do for a newcomer: `make demo` and `make test`. The first one typed makes .venv; later ones work offline.
# `make check` is what CI runs.

PYTHON ?= python3
BIN := .venv/bin
RUN := .venv/.installed-run
DEV := .venv/.installed-dev

.PHONY: demo test test-all check lint types docs docs-check sanitize gpu-check clean

demo: $(RUN)
	$(BIN)/hotset demo

test: $(DEV)
	$(BIN)/python -m pytest -m "not slow and not gpu"

test-all: $(DEV)
	$(BIN)/python -m pytest -m "not gpu"

check: lint types test sanitize docs-check

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(DEV)
	$(BIN)/mypy

docs: $(DEV)
	$(BIN)/python tools/docs.py

docs-check: $(DEV)
	$(BIN)/python tools/docs.py --check

# the kernel tests once more, built with AddressSanitizer and UndefinedBehaviorSanitizer
sanitize: $(DEV)
	$(BIN)/python tools/sanitize.py

# on a machine with a CUDA device: same bits as the CPU, time per call, no host synchronisation
gpu-check: $(DEV)
	$(BIN)/python tools/gpu_check.py

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache

$(RUN): pyproject.toml constraints.txt tools/setup.sh
	PYTHON=$(PYTHON) bash tools/setup.sh hf,plots
	touch $@

$(DEV): pyproject.toml constraints.txt tools/setup.sh
	PYTHON=$(PYTHON) bash tools/setup.sh hf,plots,dev
	touch $@ $(RUN)
