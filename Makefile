# Every target sets up what it needs on a machine that has only Python (PYTHON=python3.11 to choose one).
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
MODEL ?= models/SmolLM2-135M-Instruct.Q4_1.gguf

.PHONY: demo test test-all lint bench clean

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --disable-pip-version-check -q -e '.[dev]'
	touch $@

$(MODEL): | $(VENV)/.installed
	$(BIN)/python scripts/fetch_smollm2.py --out $(dir $(MODEL))

demo: $(VENV)/.installed $(MODEL)
	$(BIN)/python scripts/demo.py $(MODEL) demo

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: $(VENV)/.installed lint $(MODEL)
	$(BIN)/python -m pytest -n 2 --dist loadfile --durations=10 -m 'not longest'

test-all: $(VENV)/.installed lint $(MODEL)
	$(BIN)/python -m pytest --durations=10

bench: $(VENV)/.installed
	$(BIN)/python scripts/bench_kernels.py

clean:
	rm -rf $(VENV) demo models build dist
