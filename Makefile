# Everything runs in .venv at the root; the first call sets it up.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: compare test test-all lint bench clean

.venv/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q -c constraints.txt "torch==2.13.0"
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[hf,dev]"
	touch $@

compare: .venv/.installed
	$(BIN)/posenc compare

test: .venv/.installed
	$(BIN)/python -m pytest -q -n auto

lint: .venv/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

bench: .venv/.installed
	$(BIN)/posenc bench

clean:
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis dist
