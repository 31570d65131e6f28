# Every target does its own set-up; `make` alone explains.
PYTHON ?= python3
VENV   ?= .venv
ARGS   ?=

BIN   := $(VENV)/bin
READY := $(VENV)/.ready
PEERS := $(VENV)/.peers
DOCS  := $(VENV)/.docs

# Tests of one file stay in one worker, which has one pool of ranks. One thread each: threads that wait would spin.
# torch looks up the name of every peer it connects to, so a resolver that loses a packet would hold a test up for 5 s.
WORKERS ?= $(shell nproc)
PYTEST   = OMP_NUM_THREADS=1 RES_OPTIONS='timeout:1 attempts:1' $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile

.DEFAULT_GOAL := help
.PHONY: help setup train test test-all soak fuzz bench bench-adam bench-checkpoint docs lint format clean

help:  ## show this list
	@echo "zeroshard: ZeRO stages 0 to 3 for unchanged PyTorch models. The first target you run also sets up $(VENV)."
	@echo
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-16s %s\n", $$1, $$2}' Makefile
	@echo
	@echo 'Options go through ARGS, for example: make train ARGS="--stage 2 --steps 100"'

setup: $(READY)  ## only create the virtual environment and install what constraints.txt pins

# Re-done when a dependency may have changed, not when code did: the install is editable.
$(READY): pyproject.toml setup.py constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "zeroshard needs Python 3.11 or later; name one with: make PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

train: $(READY)  ## train a 10M-parameter GPT on the Python standard library's source (about two minutes on two cores)
	$(BIN)/zeroshard train $(ARGS)

test: lint  ## lint, then the tests worth running before a commit (under 8 minutes on two cores)
	$(PYTEST) -m "not slow" $(ARGS)

test-all: lint  ## lint, then all tests, also those that kill ranks, run whole jobs and try every combination of options
	$(PYTEST) $(ARGS)

soak: $(READY)  ## kill ranks of a run 30 times and see that it ends with the bits of an unbroken one (several minutes)
	$(BIN)/python -m tests.storage.killing $(ARGS)

fuzz: $(READY)  ## damage and forge every kind of file that zeroshard reads, and see what it says (2000 cases: some minutes)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz.run $(ARGS)

# DeepSpeed is the one peer that torch does not bring. Without it the others are still compared, and the table says so.
$(PEERS): $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]' || \
		echo "DeepSpeed could not be installed and will be left out"
	@touch $@

bench: $(PEERS)  ## tokens/s and peak memory beside DDP, FSDP2 and DeepSpeed, on two CPU ranks (about five minutes)
	PYTHONPATH=. $(BIN)/python benchmarks/cpu_step.py $(ARGS)

bench-adam: $(PEERS)  ## the host optimizer beside DeepSpeed's, torch's and the memory's own speed (about a minute)
	$(BIN)/python benchmarks/adam.py $(ARGS)

bench-checkpoint: $(READY)  ## saving and loading beside torch.distributed.checkpoint (about a minute)
	$(BIN)/python benchmarks/checkpoint.py $(ARGS)

$(DOCS): $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@touch $@

# Every page is read anew (-E), because parts of the reference follow from the code. Needs no network.
docs: $(DOCS)  ## build the documentation into docs/_build; a warning or a broken link is an error
	$(BIN)/python -m sphinx -W --keep-going -n -q -E -b html docs docs/_build
	@echo "open docs/_build/index.html"

lint: $(READY)  ## ruff (lint and format) and mypy --strict
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)  ## let ruff rewrite the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove the virtual environment, caches and build outputs
	rm -rf $(VENV) build dist docs/_build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis zeroshard/offload/native/*.so
