# Two commands do everything on a fresh machine: make demo, make test.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test install lint types clean

demo: install
	$(BIN)/cdgp demo --out runs/demo --overwrite

test: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest -n 2 --dist loadfile

install: $(VENV)/installed

# One pip call resolves everything at once, so that torch is downloaded once.
$(VENV)/installed: pyproject.toml
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -e ".[demo,dev]"
	touch $@

lint: install
	$(BIN)/ruff check . && $(BIN)/ruff format --check .

types: install
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache
