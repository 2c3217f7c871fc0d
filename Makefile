# `make help` lists the targets.
#
# Everything goes into the environment that PYTHON (default python3) belongs to; where that is no virtual and no conda
# environment, into .venv, made from it. VENV=folder takes that virtual environment, VENV= (empty) PYTHON as it is.
# TORCH=torch==2.13.0 (say) chooses torch; otherwise one from 2.10 on stays, and the tested one comes where there is none.
# CONSTRAINTS= (empty) installs the newest of everything in place of the versions of constraints.txt, which were tested.
# CAPSFAST_CUDA=1 compiles the CUDA kernels where there is no GPU, CAPSFAST_BUILD=0 leaves the extension out.
# ARGS=... goes to pytest or to the benchmarks; with ARGS the tests run in one process. V=1 shows whole commands.
# TIER=--second leaves out of test-all what test has, TIER="--rows 1" runs one row of each table of tests.

PYTHON ?= python3
CONSTRAINTS ?= constraints.txt
CAPSFAST_CUDA ?= auto
export TORCH CONSTRAINTS ARGS V CAPSFAST_CUDA

# A build for another machine must not change the Python of .venv.
ifneq ($(filter gpu-build,$(MAKECMDGOALS)),)
VENV ?= .venv-gpu-build
endif

WHERE := $(shell $(PYTHON) .ci/environment.py where $(if $(filter undefined,$(origin VENV)),,--venv=$(VENV)))
PY := $(word 1,$(WHERE))
EXTENSION := $(if $(filter 0,$(CAPSFAST_BUILD)),,$(word 2,$(WHERE)))
CXX_FILES := $(foreach end,h inl cpp cu,$(shell find csrc tests/emulator examples -type f -name '*.$(end)'))
PARALLEL := -n auto --maxprocesses 8 --dist loadfile -p no:benchmark
# ninja prints every command; without V=1 only the name of the compiled file is left of a command that succeeded.
BRIEF := $(if $(filter-out 0,$(V)),cat,sed -uE 's|^(\[[0-9]+/[0-9]+\]) .* -c [^ ]*/(csrc/[^ ]+) .*|\1 \2|')

# A second make waits for the first. macOS has no flock.
LOCKED = $(if $(shell command -v flock),flock $(1))

SHELL := bash
.SHELLFLAGS := -o pipefail -c

# A make that this one starts, for the program in examples/serve, has a TORCH of its own.
MAKEOVERRIDES =

.PHONY: help demo test test-all build lint format docs wheel gpu-build gpu-check clean force
.DELETE_ON_ERROR:

help: ## this list
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 18
	@echo
	@sed -n '3,/^$$/s/^# \{0,1\}/  /p' Makefile

demo: ready-examples $(EXTENSION) ## train a small CapsNet on handwritten digits, then compare speeds (three minutes)
	$(PY) examples/demo.py

# Threads that wait would else spin on the cores of the tests beside theirs.
test test-all: export OMP_WAIT_POLICY = passive

test: $(EXTENSION) | ready-test ## what catches a real defect: pytest's first tier (six minutes on two cores)
	$(PY) -m pytest $(TIER) $(or $(ARGS),$(PARALLEL))

test-all: TIER ?= --all
test-all: $(EXTENSION) | ready-test ready-docs ## both tiers: every test there is (25 minutes on two cores)
	$(PY) -m pytest $(TIER) $(or $(ARGS),$(PARALLEL))

build: ready-package $(EXTENSION) ## install from this checkout, the extension in place

lint: | ready-lint ## ruff, clang-format, mypy, zizmor
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(dir $(PY))clang-format --dry-run -Werror $(CXX_FILES)
	$(PY) -m mypy
	$(dir $(PY))zizmor --quiet --offline .github

format: | ready-lint ## sort imports, format
	$(PY) -m ruff check --select I --fix .
	$(PY) -m ruff format .
	$(dir $(PY))clang-format -i $(CXX_FILES)

docs: | ready-docs ## the documentation site in build/docs; warnings are errors
	$(PY) -m sphinx -q -W --keep-going -c docs -d build/doctrees . build/docs

wheel: | ready-torch ## build a wheel in dist/ for all GPUs, check it, say where it is
	TORCH_CUDA_ARCH_LIST="$${TORCH_CUDA_ARCH_LIST:-all}" $(PY) -m pip wheel . --no-build-isolation --no-deps --wheel-dir dist
	rm -rf build/wheel
	$(PY) -m pip install --quiet --no-deps --target build/wheel $$(ls -t dist/capsfast-*.whl | head -n 1)
	$(PY) -m pip install --quiet torch-abi-audit
	$(dir $(PY))torch-abi-audit --check torch build/wheel/capsfast
	PYTHONPATH=build/wheel $(PY) .ci/wheel.py
	@ls -sh $$(ls -t dist/capsfast-*.whl | head -n 1)

gpu-build: export CAPSFAST_CUDA = 1
gpu-build: export TORCH_CUDA_ARCH_LIST := $(or $(TORCH_CUDA_ARCH_LIST),9.0)
gpu-build: $(EXTENSION) ## the extension for a machine with this PYTHON and an H100 or H200 (or TORCH_CUDA_ARCH_LIST)
	@ls -sh $(EXTENSION)

gpu-check: ## on a machine with an NVIDIA GPU, as it is: smoke calls, times, tests (ten minutes at most)
	$(PYTHON) benchmarks/gpu_check.py $(ARGS)

clean: ## remove what was built; out/, with checkpoints of training and results, and .venv stay
	rm -rf build dist *.egg-info examples/serve/serve capsfast/_C*.so* .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
	find capsfast tests benchmarks examples -name __pycache__ -prune -exec rm -r {} +

# With make -j the extension is compiled while the rest is installed.
ready-package ready-examples ready-test ready-lint ready-docs: ready-torch

ready-%: force
	@mkdir -p build/make
	@$(call LOCKED,build/make/lock) $(PYTHON) .ci/environment.py ready $(PY) $*

$(EXTENSION): setup.py build/settings capsfast/ops/schemas.inc capsfast/bench/ran.py $(shell find csrc -type f) | ready-torch
	@PYTHONUNBUFFERED=1 $(call LOCKED,build/lock) $(PY) setup.py -q build_ext --inplace | $(BRIEF)
	@touch -c $@

# Changes when what is asked of the build does.
build/settings: force
	@mkdir -p build && echo '$(CAPSFAST_CUDA) $(TORCH_CUDA_ARCH_LIST) $(CXX) $(CFLAGS) $(LDFLAGS) $(TORCH)' | cmp -s - $@ || \
	echo '$(CAPSFAST_CUDA) $(TORCH_CUDA_ARCH_LIST) $(CXX) $(CFLAGS) $(LDFLAGS) $(TORCH)' > $@

force:
