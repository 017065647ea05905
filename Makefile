# Everything runs in .venv, which `make setup` builds from nothing but Python 3.11+, pip and make.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
export OMP_NUM_THREADS ?= 1

.PHONY: help setup core check format test slow fuzz bench bench-peers bench-speed bench-env bench-continual bench-optimizers bench-oracles bench-health bench-population bench-robustness docs screenshots demo clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

$(VENV)/.installed: pyproject.toml runtime/pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt torch
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev]'
	$(BIN)/pip install --quiet -c constraints.txt -e ./runtime
	-$(MAKE) core
	@touch $@

setup: $(VENV)/.installed  ## build .venv with everything the project needs

# In a clone that shares another checkout's environment: make core VENV=/path/to/.venv
core: export PATH := $(abspath $(BIN)):$(PATH)
core:  ## compile the native core into src/tailguard/kernels (after every change of its C++)
	@cmake $(if $(filter environment,$(origin CXX)),--fresh) -S . -B build/core -G Ninja -DTAILGUARD_IN_PLACE=ON \
	  -DPython_EXECUTABLE=$(abspath $(BIN)/python) -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) > /dev/null \
	  && cmake --build build/core -- --quiet \
	  || { rm -f src/tailguard/kernels/_native*.so; echo 'The native core was not built: everything runs without it, slower.'; exit 1; }

check: setup  ## format, lint, types, import arrows
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup  ## apply the formatter and the safe lint fixes
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

test: setup  ## the fast tests
	$(BIN)/pytest -n 2

slow: setup  ## learning, fault injection, independent engines: tens of minutes
	$(BIN)/pytest -n 2 -m slow

fuzz: setup  ## 20,000 spoiled files and names: no traceback, no crash, no late answer, no wrong load; about ten minutes
	$(BIN)/python -m tests.fuzz --cases 20000 --seed 0

bench: bench-peers bench-speed bench-env bench-continual bench-optimizers  ## all benchmarks; figures go to benchmarks/RESULTS.md

bench-peers: setup  ## ours against other recurrent PPOs on the same work, interleaved, about half an hour
	$(BIN)/python -m benchmarks.peers --env cartpole
	$(BIN)/python -m benchmarks.peers --env trading

bench-speed: setup  ## collecting, roofline, scaling, time to the optimum: about half an hour
	$(BIN)/python -m benchmarks.stages
	$(BIN)/python -m benchmarks.rollout_speed
	$(BIN)/python -m benchmarks.roofline
	$(BIN)/python -m benchmarks.scaling
	$(BIN)/python -m benchmarks.time_to_optimum

bench-env: setup  ## the trading environment against gym-trading-env and gym-anytrading
	$(BIN)/python -m benchmarks.env_speed

bench-continual: setup  ## UPGD, Adam and controls on permuted digits, about half an hour
	$(BIN)/python -m benchmarks.continual --write

bench-optimizers: setup  ## cost of one optimizer step beside torch's AdamW
	$(BIN)/python -m benchmarks.optimizer_cost --write

bench-health: setup  ## what figures and alerts cost beside the same training without them
	$(BIN)/python -m benchmarks.health_cost --write

bench-population: setup  ## what a population costs beside plain runs and Ray Tune, and what it earns beside fixed settings
	$(BIN)/python -m benchmarks.population --rounds 3 --repeats 2 --write
	$(BIN)/python -m benchmarks.ray_tune --write
	$(BIN)/python -m benchmarks.explore --write
	$(BIN)/python -m benchmarks.population_regime --write

bench-robustness: setup  ## agents under attack, with and without robust training; about an hour
	$(BIN)/python -m benchmarks.robustness pendulum
	$(BIN)/python -m benchmarks.robustness regime
	$(BIN)/python -m benchmarks.robustness cost --write

bench-oracles: setup  ## what agents reach on the oracle markets beside the optimum, without memory, and RecurrentPPO
	$(BIN)/python -m benchmarks.oracles --markets regime,regime_hard,signal,noise,pairs
	$(BIN)/python -m benchmarks.oracles --markets regime --memoryless
	$(BIN)/python -m benchmarks.oracles --markets regime --memoryless --blind
	$(BIN)/python -m benchmarks.oracles --markets regime --peers
	$(BIN)/python -m benchmarks.crash

$(VENV)/.docs-installed: $(VENV)/.installed
	$(BIN)/pip install --quiet -c constraints.txt -e '.[docs]'
	@touch $@

docs: setup $(VENV)/.docs-installed  ## execute every snippet of README and docs/, then build the site in site/
	$(BIN)/pytest -n 2 tests/test_docs.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

screenshots: setup  ## the pictures of the report in docs/img, from runs/demo, with Debian's chromium
	$(BIN)/python -m tests.evaluation.screenshots runs/demo/report.html

demo: setup  ## train on the embedded market, print the result, write runs/demo/report.html
	$(BIN)/python -m tailguard.cli demo

clean:  ## remove what the targets above made
	rm -rf $(VENV) build src/tailguard/kernels/_native*.so runs site .mypy_cache .pytest_cache .ruff_cache
