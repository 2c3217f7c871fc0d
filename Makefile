# `make help` lists the targets.
#
# Where things are installed: if PYTHON (default python3) belongs to a virtual environment or to a conda
# environment other than base, that environment is used; otherwise .venv is made from it. VENV=folder
# uses or makes that virtual environment, VENV= (empty) takes PYTHON as it is.
# TORCH=requirement says which torch to install, such as TORCH=torch==2.13.0. Without it a torch of
# version 2.10 or newer stays as it is, and the newest is installed where there is none.
# CAPSFAST_BUILD=0 leaves the extension out. ARGS=... goes to pytest or to the benchmark sweep.

PYTHON ?= python3
TORCH ?=
ARGS ?=

IN_ENVIRONMENT := import sys, os; p = sys.prefix; \
	print("yes" * (p != sys.base_prefix or os.path.isdir(p + "/conda-meta") and not os.path.isdir(p + "/condabin")))
ifeq ($(origin VENV), undefined)
VENV := $(if $(shell $(PYTHON) -c '$(IN_ENVIRONMENT)'),,.venv)
endif
ifeq ($(strip $(VENV)),)
PY := $(PYTHON)
PREFIX := $(shell $(PYTHON) -c 'import sys; print(sys.prefix)')
else
PY := $(VENV)/bin/python
PREFIX := $(abspath $(VENV))
endif
PIP := $(PY) -m pip --disable-pip-version-check

# Stamps, one folder for each environment; a new pyvenv.cfg means that the environment was made anew.
STAMPS := build/make/$(shell printf %s '$(PREFIX)' | cksum | cut -d ' ' -f 1)
BORN := $(wildcard $(PREFIX)/pyvenv.cfg)
EXTENSION := $(if $(filter 0,$(CAPSFAST_BUILD)),,$(STAMPS)/extension)

.PHONY: help demo test build lint format wheel bench gpu-check clean force
.DELETE_ON_ERROR:

help: ## this list
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 18
	@echo
	@sed -n '3,/^$$/s/^# \{0,1\}/  /p' Makefile

demo: $(STAMPS)/examples $(EXTENSION) ## train a small CapsNet on handwritten digits, then compare speeds
	$(PY) examples/digits.py
	$(PY) -m capsfast bench

test: lint $(EXTENSION) ## ruff, mypy, pytest
	$(PY) -m pytest $(ARGS)

build: $(STAMPS)/package $(EXTENSION) ## install from this checkout, the extension in place

lint: $(STAMPS)/test ## ruff, mypy
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: $(STAMPS)/test ## sort imports, format
	$(PY) -m ruff check --select I --fix .
	$(PY) -m ruff format .

wheel: $(STAMPS)/torch ## build a wheel in dist/, check it, say where it is
	$(PIP) wheel . --no-build-isolation --no-deps --wheel-dir dist
	-$(PIP) install --quiet torch-abi-audit
	$(PY) .ci/wheel.py $$(ls -t dist/capsfast-*.whl | head -n 1)

bench: $(STAMPS)/examples $(EXTENSION) ## all benchmarks: the record of this machine, docs/benchmarks.md
	$(PY) benchmarks/sweep.py $(ARGS)
	$(PY) benchmarks/report.py

gpu-check: ## on a machine with an NVIDIA GPU, as it is: build, tests, sanitizers, benchmarks
	$(PYTHON) benchmarks/gpu_check.py $(ARGS)

clean: ## remove what was built, leaving .venv
	rm -rf build dist out *.egg-info capsfast/_C*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
	find capsfast tests benchmarks examples -name __pycache__ -prune -exec rm -r {} +

# Holds the last TORCH asked for; changes only when another one is.
$(STAMPS)/request: force
	@mkdir -p $(@D)
	@touch -a $@
	@test -z '$(TORCH)' || printf %s '$(TORCH)' | cmp -s - $@ || printf %s '$(TORCH)' > $@

# An older torch is replaced only where TORCH asks for it.
TOO_OLD := import importlib.util, sys; \
	sys.version_info < (3, 10) and sys.exit("capsfast needs Python 3.10, this is " + sys.version); \
	"torch" in sys.argv and importlib.util.find_spec("torch") or sys.exit(); \
	import torch; \
	tuple(map(int, torch.__version__.split(".")[:2])) < (2, 10) and sys.exit( \
	f"torch {torch.__version__} is here, capsfast needs 2.10: VENV=.venv makes an environment of its own, " \
	"TORCH=torch==2.13.0 (say) replaces the torch that is here")

$(STAMPS)/torch: $(STAMPS)/request $(BORN)
	$(PY) -m pip --version || $(if $(strip $(VENV)),$(PYTHON) -m venv $(VENV),$(PY) -m ensurepip)
	@$(PY) -c '$(TOO_OLD)' $(if $(TORCH),,torch)
	echo '$(or $(TORCH),torch>=2.10) setuptools>=77 wheel ninja pybind11>=2.12' | xargs $(PIP) install
	@touch $@

# The package and its dependencies. The extension is built apart, where the next build finds its objects.
$(STAMPS)/package $(STAMPS)/examples $(STAMPS)/test: $(STAMPS)/torch pyproject.toml
	CAPSFAST_BUILD=0 $(PIP) install --no-build-isolation --editable '.$(subst [package],,[$(@F)])'
	@touch $@

# CUDA kernels, where there is a toolkit, for the GPUs of this machine; a wheel has them for all.
GPUS = $(or $(strip $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | sort -u)),8.0 9.0)
LOADS := import capsfast, sys; sys.exit(capsfast.backends()["cpp"].reason or 0)

$(STAMPS)/extension: $(STAMPS)/torch setup.py $(shell find csrc -type f)
	TORCH_CUDA_ARCH_LIST="$${TORCH_CUDA_ARCH_LIST:-$(GPUS)}" $(PY) setup.py build_ext --inplace
	@$(PY) -c '$(LOADS)'
	@touch $@

force:
