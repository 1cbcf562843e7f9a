# `make demo` and `make test` need Python 3.11 or newer and nothing else: they create .venv and install into it.
# Byte-compiling torch and transformers whole takes longer than compiling on first use what is used, hence --no-compile.
# A stamp file per set of extras keeps later calls from installing again, until pyproject.toml changes.
# Compiled modules are kept even where the environment says not to: every process that a test starts imports torch.
export PYTHONDONTWRITEBYTECODE :=
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet --no-compile --editable
PYTEST := $(BIN)/python -m pytest
# Test files are dealt to two processes; the tests of a file share what it traces and plans.
WORKERS ?= -n 2 --dist loadfile
# Seconds for a whole test run; single tests have the shorter `timeout` of pyproject.toml.
TEST_SECONDS ?= 1200
TEST_ALL_SECONDS ?= 7200

.PHONY: demo test test-all check clean

demo: $(VENV)/.installed-hf
	$(BIN)/python -m examples.demo

test: $(VENV)/.installed-test
	$(PYTEST) -m 'not slow' $(WORKERS) --session-timeout=$(TEST_SECONDS)

test-all: $(VENV)/.installed-test
	$(PYTEST) $(WORKERS) --session-timeout=$(TEST_ALL_SECONDS)

check: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache *.egg-info

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit("autopar needs Python 3.11 or newer, this is " + sys.version) if sys.version_info < (3, 11) else 0'
	$(PYTHON) -m venv $(VENV)

# A bigger set contains the smaller ones, so it leaves their stamps too.
$(VENV)/.installed-hf: pyproject.toml | $(BIN)/python
	$(PIP) '.[hf]'
	touch $@

$(VENV)/.installed-test: pyproject.toml | $(BIN)/python
	$(PIP) '.[hf,test]'
	touch $(VENV)/.installed-hf $@

$(VENV)/.installed-dev: pyproject.toml | $(BIN)/python
	$(PIP) '.[hf,test,dev]'
	touch $(VENV)/.installed-hf $(VENV)/.installed-test $@
