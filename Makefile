# Every target installs what it needs. PYTHON=/path/to/python overrides the search for an interpreter.
VENV ?= .venv
PYTHON ?=
HOST ?= 127.0.0.1
PORT ?= 8000
WORKERS ?= 3
ARGS ?=
DEVICES ?= auto
EXAMPLES ?= 2500

BIN := $(VENV)/bin
RUNTIME := $(VENV)/.jaxserve
BENCH := $(VENV)/.jaxserve-bench
DEV := $(VENV)/.jaxserve-dev
CLIENTS := $(VENV)-clients/.jaxserve
NATIVE := $(VENV)/.jaxserve-native
CUDA_PLUGIN := $(VENV)/cuda-plugin
REAL := build/real
SOURCES := jaxserve tests bench examples scripts setup.py $(wildcard pallas_kernels checkpoints)

.DEFAULT_GOAL := help
.PHONY: help serve demo demo-cluster test test-clients test-real test-regroups test-thorough check check-gpu-compile format bench bench-peers clean
# All targets share one environment.
.NOTPARALLEL:

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):[^#]*## /\1\t/p' $(MAKEFILE_LIST) | awk -F'\t' '{printf "make %-17s %s\n", $$1, $$2}'

serve: $(RUNTIME) $(NATIVE) ## serve the bundled model (HOST, PORT, ARGS="MODEL --option ...")
	@exec $(BIN)/jaxserve serve --host $(HOST) --port $(PORT) $(ARGS)

demo: $(BENCH) $(NATIVE) ## watch precision and KV cache follow a burst: writes build/demo/report.html and result.json
	@$(BIN)/python -m bench.demo $(ARGS)

demo-cluster: $(BENCH) $(NATIVE) ## watch instances merge, split, drop layers and restore them (DEVICES=auto|virtual|gpu, ARGS=--fail)
	@$(BIN)/python -m bench.cluster --devices $(DEVICES) $(ARGS)

# Three processes even on two cores, because tests wait for servers; each takes up to about 5 GB.
# A process with a hanging test is ended, and replaced once.
test: $(DEV) $(NATIVE) ## run the tests (ARGS="-k name ...", WORKERS=0 for one process)
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile --max-worker-restart 1 $(ARGS)

test-clients: $(CLIENTS) ## run the tests with other people's client libraries (ARGS="-k name ...")
	$(VENV)-clients/bin/python -m pytest tests/clients $(ARGS)

test-real: $(DEV) $(NATIVE) $(REAL)/smollm2/config.json ## check a real model's answers and losses, about 15 minutes; downloads 330 MB once
	REAL_WEIGHTS=$(REAL) $(BIN)/python -m pytest tests/real $(ARGS)

test-regroups: $(DEV) $(NATIVE) ## regroup instances at random for about 15 minutes (EXAMPLES=2500 histories)
	REGROUP_EXAMPLES=$(EXAMPLES) $(BIN)/python -m pytest tests/control/test_regrouping.py \
	  tests/library/test_random_regroups.py $(ARGS)

test-thorough: $(DEV) $(NATIVE) ## run the tests with all cases of long lists, of which make test takes some
	THOROUGH=1 $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile --max-worker-restart 1 $(ARGS)

check: $(DEV) ## lint, format, types of the JAX-free packages, import rules, generated files
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/python -m mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python scripts/generate-options --check

check-gpu-compile: $(DEV) $(CUDA_PLUGIN) ## compile the GPU kernels for an H200: needs ptxas, no GPU; downloads 400 MB once
	GPU_COMPILE=required PYTHONPATH=$(CUDA_PLUGIN) $(BIN)/python -m pytest tests/pallas $(ARGS)

format: $(DEV) ## format, apply ruff's fixes, and generate the tables of options
	$(BIN)/python scripts/generate-options
	$(BIN)/ruff format $(SOURCES)
	$(BIN)/ruff check --fix $(SOURCES)

bench: $(BENCH) $(NATIVE) ## replay a minute of bursty traffic: a table, bench/out/burst.json and bench/out/burst.html
	$(BIN)/jaxserve bench trace --spawn --synthetic azure-burst --duration 60 --rate 8 --scale-lengths 0.2 \
	  --goodput ttft:500 tpot:50 --label burst --save-result bench/out/burst.json $(ARGS)
	$(BIN)/jaxserve bench report bench/out/burst.json --out bench/out/burst.html

bench-peers: $(BENCH) $(NATIVE) ## compare the speed with other engines (ARGS="--peer-python PATH ...")
	$(BIN)/python -m bench.peers $(ARGS)

clean: ## remove the environment and everything generated
	rm -rf $(VENV) $(VENV)-clients bench/out build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find jaxserve pallas_kernels tests bench -name __pycache__ -type d -prune -exec rm -rf {} +

$(RUNTIME): pyproject.toml setup.py scripts/make-venv
	@scripts/make-venv "$(VENV)" "." "$(PYTHON)"
	@touch $@

$(BENCH): pyproject.toml setup.py scripts/make-venv
	@scripts/make-venv "$(VENV)" ".[bench]" "$(PYTHON)"
	@touch $(RUNTIME) $@

$(CLIENTS): pyproject.toml setup.py scripts/make-venv
	@scripts/make-venv "$(VENV)-clients" ".[clients]" "$(PYTHON)"
	@touch $@

$(REAL)/smollm2/config.json: scripts/real-weights tests/real/convert.py
	@scripts/real-weights $(REAL) $(BIN)/python
	@touch $@

$(DEV): pyproject.toml setup.py scripts/make-venv
	@scripts/make-venv "$(VENV)" ".[dev]" "$(PYTHON)"
	@touch $(RUNTIME) $(BENCH) $@

# Native CPU kernels; without a C++ compiler plain XLA is used instead.
$(NATIVE): $(wildcard jaxserve/kernels/native/*.cc jaxserve/kernels/native/*.h jaxserve/kernels/native/build.py) $(RUNTIME)
	@$(BIN)/python -m jaxserve.kernels.native --optional
	@touch $@

# Outside of the environment's site-packages: with the plugin there, JAX would look for a GPU at every start.
$(CUDA_PLUGIN): $(RUNTIME)
	@version=$$($(BIN)/python -c 'import jax; print(jax.__version__)'); \
	  if command -v uv >/dev/null 2>&1; then pip="uv pip install --python $(BIN)/python"; \
	  else pip="$(BIN)/python -m pip install"; fi; \
	  $$pip --quiet --no-deps --target $@ jax-cuda13-plugin==$$version jax-cuda13-pjrt==$$version
	@touch $@
