# Everything a fresh machine needs: Python 3.10+, make and a package index.
PYTHON ?= python3
# The CPU build. An unpinned torch takes a CUDA build of several GB.
TORCH ?= torch==2.13.0
# Processes that run tests; one of them has all that need Ray. More than one on two cores disturbs those.
JOBS ?= 1
VENV := .venv
BIN := $(VENV)/bin

.PHONY: install demo test lint clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml Makefile
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)" -e '.[dev]'
	touch $@

demo: install
	$(BIN)/raycheck demo

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest -n $(JOBS) --no-loadscope-reorder --durations=15

clean:
	rm -rf $(VENV) raycheck-demo
