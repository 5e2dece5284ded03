# Two commands: `make demo` sets up and climbs the ladder, `make test` sets up and passes the tests.
#
#   make demo                      its own environment in .venv, then the ladder on the embedded default
#   make demo PYTHON=/path/python  the same on top of an interpreter that has torch already
#   make demo ARGS="--preset shakespeare"   any options of `fuseline ladder`
#   make test                      lint, types, import rules, tests
#   make test-slow                 the compilers at work: every kernel for every architecture, inductor

PYTHON ?= python3
VENV ?= .venv
ARGS ?=

.PHONY: demo test test-slow lint clean

demo: $(VENV)/.demo
	$(VENV)/bin/fuseline ladder $(ARGS)

test: $(VENV)/.dev lint
	$(VENV)/bin/python -m pytest -n 2 --dist loadfile -m "not slow" $(ARGS)

test-slow: $(VENV)/.dev
	$(VENV)/bin/python -m pytest -n 2 --dist worksteal -m slow $(ARGS)

lint: $(VENV)/.dev
	$(VENV)/bin/ruff check src tests examples benchmarks
	$(VENV)/bin/ruff format --check src tests examples benchmarks
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports --no-cache

# An interpreter that has torch lends it (and what stands beside it) to the environment through a .pth
# file; torch's own pin then falls away, all others hold.
$(VENV)/constraints.txt: constraints.txt
	$(PYTHON) -m venv $(VENV)
	@if $(PYTHON) -c "import torch" 2>/dev/null; then \
	  $(PYTHON) -c "import pathlib, torch; print(pathlib.Path(torch.__file__).parent.parent)" \
	    > "$$($(VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/torch-from-outside.pth"; \
	  grep -v '^torch==' constraints.txt > $@; \
	  echo "Using the torch of $(PYTHON)."; \
	else \
	  cp constraints.txt $@; \
	fi

$(VENV)/.demo: $(VENV)/constraints.txt pyproject.toml
	$(VENV)/bin/python -m pip install --disable-pip-version-check -q -c $(VENV)/constraints.txt -e .
	@touch $@

$(VENV)/.dev: $(VENV)/constraints.txt pyproject.toml
	$(VENV)/bin/python -m pip install --disable-pip-version-check -q -c $(VENV)/constraints.txt -e ".[dev]"
	@touch $@ $(VENV)/.demo

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
