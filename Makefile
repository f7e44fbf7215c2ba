# make train                 train GPT-2 on this machine's GPU, or on its CPU
# make train ARGS="-x 100"   with flags for train_gpt2_fp32.py
# make test                  the tests; those that need a GPU are skipped where there is none
# make test-gpu              the tests on the GPU
# make bench                 time every kernel and the training step on the GPU, then write the docs' tables
# make doc-tables            write the docs' tables and plots anew from doc/benchmarks/*.json
# make lint

PYTHON ?= python3
ARGS ?=
BIN = .venv/bin

# The CUDA version that the driver speaks, as an extra of pyproject.toml: cu12, cu13, or nothing where there is no driver.
DRIVER := $(shell nvidia-smi 2>/dev/null | sed -n 's/.*CUDA Version: *\([0-9]*\).*/\1/p')
COMMA := ,
CUDA := $(if $(DRIVER),$(if $(filter 12,$(DRIVER)),cu12,cu13))
TEST := $(if $(CUDA),test$(COMMA)$(CUDA),dev)

.PHONY: train test test-gpu bench doc-tables lint

train: .venv/installed
	$(BIN)/python train_gpt2_fp32.py $(ARGS)

test: .venv/ready-to-test
	$(BIN)/python -m pytest $(ARGS)

test-gpu: .venv/ready-to-test
	$(BIN)/python -m pytest -m gpu -n 0 $(ARGS)

bench: .venv/ready-to-test
	$(BIN)/python -m kernels.bench $(ARGS)

doc-tables: .venv/ready-to-test
	$(BIN)/python doc/tables.py $(ARGS)

lint: .venv/ready-to-test
	$(BIN)/ruff check .

.venv/installed: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --editable '.[$(CUDA)]'
	touch $@

.venv/ready-to-test: .venv/installed
	$(BIN)/pip install --quiet --editable '.[$(TEST)]'
	touch $@
