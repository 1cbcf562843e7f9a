# `make demo` and `make test` need Python 3.11 or newer and nothing else: they create .venv and install into it.
# Byte-compiling torch and transformers whole takes longer than compiling on first use what is used, hence --no-compile.
# A stamp file per set of extras keeps later calls from installing again, until pyproject.toml or constraints.txt changes.
# Compiled modules are kept even where the environment says not to: every process that a test starts imports torch.
export PYTHONDONTWRITEBYTECODE :=
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Versions are those of constraints.txt.
PINS := constraints.txt
INSTALL = -m pip install --disable-pip-version-check --quiet --no-compile
PIP := $(BIN)/python $(INSTALL) --constraint $(PINS) --editable
PYTEST := $(BIN)/python -m pytest
# Test files are dealt to two processes; the tests of a file share what it traces and plans. tests/conftest.py orders them.
WORKERS ?= -n 2 --dist loadfile --no-loadscope-reorder
# Seconds for a whole test run; single tests have the shorter `timeout` of pyproject.toml.
TEST_SECONDS ?= 1200
TEST_ALL_SECONDS ?= 5000
# `make test-newest` runs the suite with the newest torch that pyproject.toml admits, in an environment of its own: some
# gigabytes, since newer releases bring their CUDA libraries. TESTS="-m 'not slow'" leaves the slow tests out.
NEWEST_PYTHON ?= $(PYTHON)
NEWEST := .venv-newest
TESTS ?=

.PHONY: demo test test-all test-newest check docs pins clean

demo: $(VENV)/.installed-hf
	$(BIN)/python -m examples.demo

test: $(VENV)/.installed-test
	$(PYTEST) -m 'not slow' $(WORKERS) --session-timeout=$(TEST_SECONDS)

test-all: $(VENV)/.installed-test
	$(PYTEST) $(WORKERS) --session-timeout=$(TEST_ALL_SECONDS)

test-newest: $(NEWEST)/.installed
	$(NEWEST)/bin/python -m pytest $(TESTS) $(WORKERS) --session-timeout=$(TEST_ALL_SECONDS)

check: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The site of docs/ in site/: some five seconds, without network; a link that leads nowhere is an error.
docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

# What is installed now becomes what is installed from now on.
pins: $(VENV)/.installed-dev $(VENV)/.installed-docs
	grep '^#' $(PINS) > $(PINS).new
	$(BIN)/python -m pip freeze --exclude-editable | sed 's/+cpu$$//' >> $(PINS).new
	mv $(PINS).new $(PINS)

clean:
	rm -rf $(VENV) $(NEWEST) site .mypy_cache .ruff_cache .pytest_cache .import_linter_cache *.egg-info

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit("autopar needs Python 3.11 or newer, this is " + sys.version) if sys.version_info < (3, 11) else 0'
	$(PYTHON) -m venv $(VENV)

# A bigger set contains the smaller ones, so it leaves their stamps too.
$(VENV)/.installed-hf: pyproject.toml $(PINS) | $(BIN)/python
	$(PIP) '.[hf]'
	touch $@

$(VENV)/.installed-test: pyproject.toml $(PINS) | $(BIN)/python
	$(PIP) '.[hf,test]'
	touch $(VENV)/.installed-hf $@

$(VENV)/.installed-dev: pyproject.toml $(PINS) | $(BIN)/python
	$(PIP) '.[hf,test,dev]'
	touch $(VENV)/.installed-hf $(VENV)/.installed-test $@

$(VENV)/.installed-docs: pyproject.toml $(PINS) | $(BIN)/python
	$(PIP) '.[docs]'
	touch $@

$(NEWEST)/.installed: pyproject.toml
	$(NEWEST_PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/python $(INSTALL) --upgrade --editable '.[hf,test]'
	touch $@
