# Two commands do for a newcomer: `make demo` and `make test`. The first one typed makes .venv; later ones work offline.
# `make check` is what CI runs.

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: demo test test-all check lint types docs docs-check sanitize gpu-check clean

demo: $(STAMP)
	$(BIN)/hotset demo

test: $(STAMP)
	$(BIN)/python -m pytest -m "not slow and not gpu"

test-all: $(STAMP)
	$(BIN)/python -m pytest

check: lint types test docs-check

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

docs: $(STAMP)
	$(BIN)/python tools/docs.py

docs-check: $(STAMP)
	$(BIN)/python tools/docs.py --check

gpu-check: $(STAMP)
	$(BIN)/python tools/gpu_check.py

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache

$(STAMP): pyproject.toml constraints.txt tools/setup.sh
	PYTHON=$(PYTHON) bash tools/setup.sh
