# Everything a fresh machine needs: Python 3.10+, make and a package index.
PYTHON ?= python3
# The CPU build. An unpinned torch takes a CUDA build of several GB.
TORCH ?= torch==2.13.0
# Processes that run tests; one of them has all that need Ray.
JOBS ?= 2
VENV := .venv
BIN := $(VENV)/bin

.PHONY: install demo test test-users lint clean

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

# What users run takes whole jobs, several starts each: as long again as all other tests.
USERS := tests/ray_jobs/users
PYTEST := $(BIN)/python -m pytest --durations=15

test: lint
	$(PYTEST) -n $(JOBS) --no-loadscope-reorder --ignore=$(USERS)

test-users: install
	$(PYTEST) $(USERS)

clean:
	rm -rf $(VENV) raycheck-demo
