# shardweave: `make demo` on a machine with Python >= 3.11 and nothing else installed.
#
# PYTHON names the interpreter that builds .venv; by default the first one on the PATH that is
# new enough.

MIN_PYTHON := 3.11
PYTHON_CANDIDATES := python3 python3.13 python3.12 python3.11 python3.14
IS_NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))

# The package has no upper pin on torch; .venv has the version that the pages' figures were measured
# with. TORCH names another, as in `make test TORCH=2.11.*`, or is `newest`: it gets an environment
# of its own. The interpreter of triton 3.6, that of torch 2.11, needs an older numpy.
MEASURED_TORCH := 2.13.0
TORCH :=
NUMPY := $(if $(filter 2.11%,$(TORCH)),'numpy<2.4')
TORCH_REQUIREMENTS := $(if $(filter newest,$(TORCH)),--upgrade torch,'torch==$(or $(TORCH),$(MEASURED_TORCH))' $(NUMPY))
VENV := .venv$(if $(TORCH),-torch-$(subst *,x,$(TORCH)))
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# pyright takes the name of a package from its folder, and a clone may be called anything.
PACKAGE_LINK := $(VENV)/src/shardweave
# The other files there are parts of these.
BENCHMARKS := $(wildcard benchmarks/compile_time.py benchmarks/ir_tools.py benchmarks/training.py \
    benchmarks/small_steps.py benchmarks/loops.py benchmarks/pipelines.py benchmarks/zero.py benchmarks/optimizers.py \
    benchmarks/optimizers_of_others.py \
    benchmarks/mixed_speeds.py benchmarks/overlap.py \
    benchmarks/context.py benchmarks/schedules.py benchmarks/oases_table3.py)
PLANNERS := oases amp
WORKERS := 2

# pip would compile 250 MB of sources, one by one, of which most are never imported. What is, is
# compiled once, whatever the environment says: tests and ranks are many processes.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help demo test test-slow test-newest check format docs bench bench-gpu clean $(VENV)

help:
	@echo "make demo       capture, shard, run and check two small transformers; a page to look at"
	@echo "make test       the fast tests"
	@echo "make test-slow  the slow tests"
	@echo "make test-newest  the fast tests with the newest torch that there is, installed anew"
	@echo "make check      ruff and pyright"
	@echo "make format     reformat the sources"
	@echo "make docs       the pages as a site, in build/site"
	@echo "make bench      the benchmarks, quickly"
	@echo "make bench-gpu  the one for a GPU; without one it says what it would measure"
	@echo "make clean      remove .venv, caches and build outputs"
	@echo "TORCH=2.11.*    with another version of torch, in an environment of its own"
	@echo "PYTHON=...      the interpreter to build .venv with (>= $(MIN_PYTHON))"

$(VENV): $(STAMP)

$(STAMP): pyproject.toml
	@python='$(PYTHON)'; \
	if [ -z "$$python" ]; then \
	    for candidate in $(PYTHON_CANDIDATES); do \
	        if "$$candidate" -c '$(IS_NEW_ENOUGH)' >/dev/null 2>&1; then \
	            python="$$candidate"; break; \
	        fi; \
	    done; \
	fi; \
	if [ -z "$$python" ]; then \
	    echo "make: no Python >= $(MIN_PYTHON) found (tried $(PYTHON_CANDIDATES));" \
	         "install one, or name it: make PYTHON=/path/to/python" >&2; exit 1; \
	fi; \
	if ! command -v "$$python" >/dev/null; then \
	    echo "make: there is no program '$$python'; give PYTHON the path of a Python" \
	         ">= $(MIN_PYTHON), or leave it out" >&2; exit 1; \
	fi; \
	if ! "$$python" -c '$(IS_NEW_ENOUGH)'; then \
	    echo "make: $$python is $$("$$python" --version 2>&1), but shardweave needs Python" \
	         ">= $(MIN_PYTHON); name a newer one: make PYTHON=/path/to/python" >&2; exit 1; \
	fi; \
	if ! "$$python" -c 'import ensurepip, venv' >/dev/null 2>&1; then \
	    echo "make: $$python cannot make virtual environments (no venv or ensurepip module);" \
	         "install them (on Debian: apt install python3-venv)" >&2; exit 1; \
	fi; \
	echo "building $(VENV) with $$("$$python" --version) ($$python)"; \
	"$$python" -m venv $(VENV)
	@echo "installing torch and what else is needed: once, some GB, some minutes"
	@$(BIN)/python -m pip install --disable-pip-version-check --progress-bar on --no-compile \
	    --editable '.[hf,oppa,dev]' $(TORCH_REQUIREMENTS)
	@mkdir -p $(dir $(PACKAGE_LINK)) && ln -sfn ../.. $(PACKAGE_LINK)
	@touch $@

demo: $(STAMP)
	$(BIN)/python examples/demo.py

# A worker begins with one half of the tests, in order, since what a test captures the next ones
# use too; the one that is done first takes over some of what the other has left.
test: $(STAMP)
	$(BIN)/pytest -n $(WORKERS) --dist worksteal

test-slow: $(STAMP)
	$(BIN)/pytest -m slow

# Slow, as it looks for a newer torch each time: some GB, some minutes.
test-newest:
	rm -f .venv-torch-newest/.installed
	$(MAKE) test TORCH=newest

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --threads $(WORKERS) -p $(PACKAGE_LINK) --pythonpath $(BIN)/python

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(STAMP)
	$(BIN)/mkdocs build

bench: $(STAMP)
	@set -e; for benchmark in $(BENCHMARKS); do \
	    echo "$$benchmark --quick"; $(BIN)/python "$$benchmark" --quick; \
	done; \
	for planner in $(PLANNERS); do \
	    echo "benchmarks/planners.py $$planner --quick"; \
	    $(BIN)/python benchmarks/planners.py "$$planner" --quick; \
	done

bench-gpu: $(STAMP)
	$(BIN)/python benchmarks/gpu.py $(BENCH_OPTIONS)

clean:
	rm -rf .venv .venv-torch-* build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
