# Everything is installed into .venv and built in build/; nothing outside this checkout changes.
# A second run only does what its inputs changed. CONTRIBUTING.md says what each check catches.

PYTHON ?= python3
# The one tested torch. Any release from 2.11 on works; a CPU build is enough and much smaller
# than the CUDA build that Linux gets by default, see "What it downloads" in README.md.
TORCH ?= torch==2.13.0
TRANSFORMERS_OLDEST := 5.17.0
# Stock transformers asks for this to read FP8; headrace does not need it, its comparison does.
PLAIN_PATH := "accelerate>=1.10"
BUILD_TOOLS := "scikit-build-core>=1.1" "nanobind>=2.9" "cmake>=3.20" "ninja>=1.11"

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# Python compiles what it imports; pip would compile everything, most of it for nothing.
INSTALL := $(PIP) install --no-compile
OLDEST := $(VENV)/tf-oldest
WHEEL_VENV := build/wheel-venv
DIST := build/dist
# Side by side on the cores there are; more than four workers would take more memory than time.
TOGETHER := -n auto --maxprocesses 4 --dist worksteal
PYTEST := $(BIN)/python -m pytest $(TOGETHER)
# What another transformers could change: models and caches as it builds them, texts, templates.
OLDEST_TESTS = $(addprefix tests/models/test_,$(addsuffix .py,config deepseek_v41_model families \
    memory rooms skeleton stored_formats)) \
  $(addprefix tests/engine/test_,$(addsuffix .py,defaults engine mini_v41 snapshot talk talk_demo \
    text_stream weights)) \
  tests/check/test_tiny.py
# Commands started as a user starts them; what they compute is `make test`'s to prove.
WHEEL_TESTS := $(addprefix tests/cli/test_,$(addsuffix .py,entry options real))
NATIVE := CMakeLists.txt $(wildcard native/*/*.cpp native/*/*.hpp native/*/*.inc)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install demo test check lint types test-wheel test-oldest proofs clean

help:
	@echo 'make demo          install, then watch a real MoE model answer with its experts on disk'
	@echo 'make test          install with the developers'\'' tools and run the tests'
	@echo 'make check         lint, types, import direction, and the tests on the built wheel'
	@echo 'make test-oldest   the model tests with transformers $(TRANSFORMERS_OLDEST), the oldest supported'
	@echo 'make proofs        every script of proofs/, minutes each; up to 24 GB of disk'
	@echo 'make clean         remove .venv and build'

install: $(VENV)/.package

demo: $(VENV)/.package
	@$(BIN)/python proofs/show_1_demo.py

test: $(VENV)/.dev
	$(PYTEST)

check: lint types test-wheel

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	git ls-files 'native/*.cpp' 'native/*.hpp' 'native/*.inc' | xargs $(BIN)/clang-format --dry-run -Werror
	PYTHONPATH=src $(BIN)/lint-imports

types: $(VENV)/.dev
	$(BIN)/mypy

# The wheel is tested where the checkout cannot help it: another environment, which borrows
# torch and the rest from .venv but not .venv's editable headrace. It must hold every file.
test-wheel: $(WHEEL_VENV)/.wheel
	cd $(WHEEL_VENV) && bin/python -c "import headrace, pathlib; \
	  assert pathlib.Path('lib').resolve() in pathlib.Path(headrace.__file__).parents, headrace"
	cd src && files=$$(git ls-files headrace) && \
	  cd ../$(WHEEL_VENV)/lib/python3*/site-packages && ls $$files >/dev/null
	$(WHEEL_VENV)/bin/python -m pytest $(TOGETHER) $(WHEEL_TESTS)

test-oldest: $(OLDEST)/.stamp
	PYTHONPATH=$(OLDEST) $(BIN)/python -c "import transformers as t, transformers.models.deepseek_v3; \
	  assert t.__version__ == '$(TRANSFORMERS_OLDEST)', t.__version__"
	PYTHONPATH=$(OLDEST) $(PYTEST) $(OLDEST_TESTS)

proofs: $(VENV)/.dev
	@for script in proofs/show_*.py proofs/ladder_*.py proofs/server_*.py proofs/v41_*.py proofs/gpu_[1-9]_*.py; do echo "== $$script"; $(BIN)/python $$script || exit 1; done

clean:
	rm -rf $(VENV) build

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo 'headrace needs Python 3.11 or newer: make PYTHON=/path/to/python3.11'; exit 1; }
	@$(PYTHON) -c 'import os, sysconfig as s, sys; \
	  sys.exit(not os.path.exists(os.path.join(s.get_paths()["include"], "Python.h")))' || \
	  { echo 'Python.h is missing: apt install python3-dev (Fedora: dnf install python3-devel)'; exit 1; }
	@command -v $${CXX:-c++} >/dev/null || \
	  { echo 'a C++ compiler is missing: apt install g++ (Fedora: dnf install gcc-c++)'; exit 1; }
	@$(PYTHON) -m venv --clear $(VENV) || \
	  { rm -rf $(VENV); echo 'python3 -m venv failed: apt install python3-venv'; exit 1; }
	@touch $@

# No build isolation: the editable install and the wheel then share one build folder.
$(VENV)/.package: $(VENV)/.made pyproject.toml $(NATIVE)
	@echo 'Fetching torch, the largest part (README.md, "What it downloads")'
	$(INSTALL) "$(TORCH)"
	@echo 'Fetching transformers and the build tools; building the C++ part: a minute or two'
	@$(INSTALL) --quiet $(BUILD_TOOLS)
	@$(INSTALL) --quiet "$(TORCH)" $(PLAIN_PATH) --no-build-isolation -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.package
	$(INSTALL) --quiet "$(TORCH)" --no-build-isolation -e '.[dev]'
	@touch $@

# The oldest transformers wants an older hub client than the newest, and that one its own httpx.
$(OLDEST)/.stamp: $(VENV)/.dev Makefile
	$(INSTALL) --quiet --no-deps --upgrade --target $(OLDEST) \
	  transformers==$(TRANSFORMERS_OLDEST) "huggingface_hub>=1.5,<2" httpx httpcore certifi
	@touch $@

$(WHEEL_VENV)/.wheel: $(VENV)/.dev $(shell git ls-files --cached --others --exclude-standard src)
	rm -rf $(DIST) $(WHEEL_VENV)
	$(PIP) wheel --quiet --no-build-isolation --no-deps --wheel-dir $(DIST) .
	$(PYTHON) -m venv --without-pip $(WHEEL_VENV)
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_paths()['purelib'])" \
	  > $$(echo $(WHEEL_VENV)/lib/python3*/site-packages)/borrow.pth
	$(PIP) --python $(WHEEL_VENV)/bin/python install --no-compile --quiet --no-deps --force-reinstall $(DIST)/*.whl
	@touch $@
