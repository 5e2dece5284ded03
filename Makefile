# Two commands: `make demo` sets up and climbs the ladder, `make test` sets up and passes the tests.
#
#   make demo                      its own environment in .venv, then the ladder on the embedded default
#   make demo PYTHON=/path/python  the same on top of an interpreter that has torch already
#   make demo ARGS="--preset shakespeare"   any options of `fuseline ladder`
#   make test                      lint, types, import rules, tests (`make check`: the tests alone)
#   make fuzz                      random cases of bad will: 100,000 of ops, 5,000 of attention, 1,000 damaged files,
#                                  200 kills (tests/fuzz/run.py), then every write on a full disk
#   make fuzz ARGS="ops --cases 100000 --device cuda --jobs 16"   as many as you like, in 16 processes
#   make test-slow                 the compilers at work: a third of the kernels for Hopper, inductor
#   make test-gpu                  what needs a CUDA device; build/tests-on-gpu.jsonl says what became of each test
#   make test-full                 all of these, every architecture, every model of the suites, a longer fuzz
#   make docs                      the documentation as a site in build/site; warnings are errors

PYTHON ?= python3
VENV ?= .venv
ARGS ?=

.PHONY: demo environment test check test-slow test-gpu test-full fuzz lint docs clean

environment: $(VENV)/.dev $(VENV)/.docs

demo: $(VENV)/.demo
	$(VENV)/bin/fuseline ladder $(ARGS)

test: lint check

# Files keep the order of tests/conftest.py, where the longest come first.
check: $(VENV)/.dev
	$(VENV)/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not slow and not full" $(ARGS)

test-slow: $(VENV)/.dev
	$(VENV)/bin/python -m pytest -n 2 --dist worksteal -m "slow and not full" $(ARGS)

# -p no:benchmark: pytest-benchmark, where it is installed, warns of xdist, and warnings are errors.
test-gpu: $(VENV)/.dev
	$(VENV)/bin/python -m pytest -n 8 --dist worksteal -m gpu -p no:benchmark --record build/tests-on-gpu.jsonl $(ARGS)

test-full: test docs
	FUSELINE_TEST_FULL=1 $(VENV)/bin/python -m pytest -n 2 --dist worksteal -m "slow or full" $(ARGS)
	$(VENV)/bin/python tests/fuzz/run.py --jobs 2

fuzz: $(VENV)/.dev
	$(VENV)/bin/python tests/fuzz/run.py --jobs 2 $(ARGS)
	$(if $(ARGS),,$(VENV)/bin/python -m pytest -n 0 tests/cli/test_full_disk.py)

lint: $(VENV)/.dev
	$(VENV)/bin/ruff check src tests examples benchmarks docs/site
	$(VENV)/bin/ruff format --check src tests examples benchmarks docs/site
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports --no-cache

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --quiet
	@echo "The site is in build/site: open build/site/index.html."

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

$(VENV)/.docs: $(VENV)/constraints.txt pyproject.toml
	$(VENV)/bin/python -m pip install --disable-pip-version-check -q -c $(VENV)/constraints.txt -e ".[docs]"
	@touch $@ $(VENV)/.demo

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
