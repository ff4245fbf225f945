# Two commands do everything on a fresh machine: make demo, make test.
# All of them share one virtual environment; each installs only what it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check
# Measured on Linux x86-64, where PyTorch's wheel brings its CUDA libraries.
DEMO_SIZE := 6.4 GB

.PHONY: demo test docs lint types clean

demo: $(VENV)/installed-demo
	$(BIN)/cdgp demo --out runs/demo --overwrite

test: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/pytest -n 2 --dist loadfile

docs: $(VENV)/installed-docs
	$(BIN)/mkdocs build --strict

lint: $(VENV)/installed-dev
	$(BIN)/ruff check . && $(BIN)/ruff format --check .

types: $(VENV)/installed-dev
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build dist site .mypy_cache .ruff_cache .pytest_cache .import_linter_cache

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed-demo: pyproject.toml | $(VENV)/bin/python
	@echo "Installing the demo into $(VENV): about $(DEMO_SIZE) on Linux x86-64, nearly all of it PyTorch; less elsewhere."
	$(PIP) -e ".[demo]"
	touch $@

# One pip call resolves everything at once, so that torch is downloaded once.
$(VENV)/installed-dev: pyproject.toml | $(VENV)/bin/python
	$(PIP) -e ".[demo,dev]"
	touch $@

$(VENV)/installed-docs: pyproject.toml | $(VENV)/bin/python
	$(PIP) -e ".[docs]"
	touch $@
