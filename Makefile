# From a fresh clone, on a machine with python3 (3.10 or newer), a C++17 compiler and make:
#
#   make build          compile what has changed, and install in place            75 seconds the first time
#   make demo           train a small transformer on these kernels and on torch's   about a minute
#   make quick          what to run before each commit                            a minute and a half
#   make test           the Python tests                                         5 minutes on two cores
#   make lint           ruff, clang-format, mypy, shellcheck, names of files in comments; make format corrects style
#   make cpp-test       the C++ unit tests; with a sanitizer: SANITIZE=thread or SANITIZE=address,undefined
#   make cuda-check     compile the CUDA kernels for every architecture; needs nvcc, but no GPU
#   make ptx-test       the tests of the CUDA half as on a GPU, in a program that executes the kernels' PTX; make
#                       ptx-quick runs a part. Both need nvcc, no GPU, and 6 GB for a torch with CUDA in .ci-venv
#   make arm64-check    cross-compile for arm64 Linux, and run the C++ unit tests and "check" in an emulator; needs Debian's
#                       g++-aarch64-linux-gnu, qemu-user-static and debootstrap. make arm64-test runs a sample of the Python
#                       tests there, make arm64-wheel makes a wheel, make arm64-model estimates the inner loops, and
#                       make macos-check compiles for macOS
#   make docs           the documentation as a site: build/docs/html/index.html; make docs-test opens it in a browser
#   make wheel          a manylinux wheel; make sdist writes a source archive, make clean removes what was built
#   make wheels         one for each Python from 3.10 to 3.14 and 3.14t that is found; PYTHONS="python3.12 ..." names them
#   make test-clients   the tests with transformers, timm, diffusers and the benchmarks' peers, which are installed
#                       first, beside the installed torch; CLIENTS="transformers==4.57.*" chooses other versions
#
# ARGS passes arguments on: make test ARGS="-k causal -x", make demo ARGS="--text book.txt".
# The commands make .venv and install torch there, unless an environment with torch 2.11 or newer is activated.
# .ci/run runs all checks, which takes about 45 minutes on two cores. CONTRIBUTING.md says how to add a kernel, an
# option or a test.
# PYTHON3 chooses the Python that .venv is made with: make build PYTHON3=python3.12
# TORCH chooses the torch of .venv, and may hold any options of pip: make test TORCH="torch==2.14.1"

TORCH ?= torch==2.13.0
PYTHON3 ?= python3
CLIENTS ?= --upgrade transformers timm diffusers
PYTHONS ?=
ARGS ?=

export PIP_DISABLE_PIP_VERSION_CHECK = 1
export PIP_NO_INPUT = 1

# The folder of the activated environment if it can be used, else nothing.
ACTIVE := $(shell [ -n "$$VIRTUAL_ENV$$CONDA_PREFIX" ] && python3 -c 'import os, runpy, sys; \
	from importlib.metadata import version; \
	active = [os.path.realpath(os.environ.get(name, "/")) for name in ("VIRTUAL_ENV", "CONDA_PREFIX")]; \
	supports = runpy.run_path("selfattn_ext/build/sources.py")["supports"]; \
	usable = sys.version_info >= (3, 10) and os.path.realpath(sys.prefix) in active; \
	print(sys.prefix if usable and supports(version("torch")) else "")' 2>/dev/null)
ENV := $(or $(ACTIVE),.venv)
BIN := $(ENV)/bin
# These files say what has been done in an environment, which they name by checksum: its path may hold spaces.
STAMPS := build/make/$(shell printf %s '$(abspath $(ENV))' | cksum | cut -d ' ' -f 1)

SOURCES := $(shell find csrc .pep517 -not -name '.*.sw?' -not -name '*.pyc' -not -name __pycache__) \
	setup.py pyproject.toml $(patsubst %,selfattn_ext/build/%.py,sources toolchain cuda_build)
CPP_FILES = $(shell find csrc tests simulators -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')

.PHONY: help build demo quick test test-clients cpp-test lint format docs docs-test cuda-check \
	arm64-check arm64-test arm64-wheel arm64-model macos-check ptx-test ptx-quick wheel wheels sdist clean build/wheel
help:
	@sed -n '/^# /s/^# \{0,1\}//p;/^TORCH/q' Makefile

build: $(STAMPS)/built

demo: build
	"$(BIN)/python" -m selfattn_ext demo $(ARGS)

# "quick" checks style, and every operator and option on the best kernel and on the loops, in a tenth of test's time.
QUICK := attention/test_declared_options.py attention/test_functional.py gradients/test_gradients.py attention/test_flags.py \
	with_torch/test_overrides.py nn/test_nn.py with_torch/test_ops.py varlen/test_varlen_errors.py \
	varlen/test_varlen_calls.py kv_cache/test_attention_with_kvcache.py documents/test_environment_variables.py
quick: $(STAMPS)/lint-tools
	"$(BIN)/ruff" check .
	"$(BIN)/ruff" format --check .
	"$(BIN)/clang-format" --dry-run -Werror $(CPP_FILES)
	SELFATTN_TEST_ISAS=1 "$(BIN)/python" -m pytest --numprocesses logical --maxprocesses 8 --dist loadgroup -q \
		$(addprefix tests/,$(QUICK)) $(ARGS)

test: build
	"$(BIN)/python" -m pytest --numprocesses logical --maxprocesses 8 --dist loadgroup --durations 15 \
		-m "not sanitizers and not another_build and not thorough and not emulated_vectors and not ptx_machine" $(ARGS)

test-clients: $(STAMPS)/clients
	"$(BIN)/python" -m pytest tests/clients --numprocesses logical --maxprocesses 8 --dist loadgroup --durations 15 $(ARGS)

ifeq ($(ACTIVE),)
# torch is installed again when TORCH changes; the stamp's text says which torch .venv has.
ifneq ($(shell cat $(STAMPS)/torch 2>/dev/null),$(TORCH))
.PHONY: $(STAMPS)/torch
endif
$(STAMPS)/torch: .venv/bin/python
	.venv/bin/python -m pip install $(TORCH)
	@mkdir -p $(STAMPS) && echo '$(TORCH)' > $@
else
$(STAMPS)/torch:
	@echo "using the activated environment $(ENV)"
	@"$(BIN)/python" -m pip --version >/dev/null 2>&1 || "$(BIN)/python" -m ensurepip
	@mkdir -p $(STAMPS) && touch $@
endif

.venv/bin/python:
	@$(PYTHON3) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || { \
		echo "selfattn_ext needs Python 3.10 or newer as $(PYTHON3); another one: make PYTHON3=python3.12 ..." >&2; exit 1; }
	@$(PYTHON3) -c 'import ensurepip, venv' 2>/dev/null || { \
		echo "$(PYTHON3) cannot create environments, its venv or ensurepip module is missing: install it" \
		"(Debian, Ubuntu: apt install python3-venv), or activate an environment that has torch" >&2; exit 1; }
	$(PYTHON3) -m venv .venv

# There is no build isolation, so that a rebuild needs no network; object files stay in build/, so that it compiles what
# changed. setup.py runs before pip, because pip would show no progress.
$(STAMPS)/built: $(SOURCES) $(STAMPS)/torch
	"$(BIN)/python" -m pip install --quiet 'setuptools>=77' ninja
	"$(BIN)/python" setup.py --quiet build_ext --inplace
	"$(BIN)/python" -m pip install --quiet --no-build-isolation -e '.[test,viz]'
	@touch $@

$(STAMPS)/lint-tools: pyproject.toml $(STAMPS)/built
	"$(BIN)/python" -m pip install --quiet --no-build-isolation -e '.[lint]'
	@touch $@

# They are installed again when CLIENTS changes. The installed torch must stay: some clients accept any torch, and pip
# would take the newest.
ifneq ($(shell cat $(STAMPS)/clients 2>/dev/null),$(CLIENTS))
.PHONY: $(STAMPS)/clients
endif
$(STAMPS)/clients: pyproject.toml $(STAMPS)/built
	"$(BIN)/python" -m pip install --quiet --no-build-isolation -e '.[clients,bench,onnx]' $(CLIENTS) \
		"torch==$$("$(BIN)/python" -c 'from importlib.metadata import version; print(version("torch"))')"
	@echo '$(CLIENTS)' > $@

lint: $(STAMPS)/lint-tools
	"$(BIN)/ruff" check .
	"$(BIN)/ruff" format --check .
	"$(BIN)/clang-format" --dry-run -Werror $(CPP_FILES)
	"$(BIN)/mypy"
	"$(BIN)/shellcheck" .ci/run scripts/*.sh
	"$(BIN)/python" scripts/check_references.py
	"$(BIN)/check-jsonschema" --builtin-schema vendor.github-workflows .github/workflows/*.yml
	"$(BIN)/check-jsonschema" --builtin-schema vendor.github-issue-forms $(addprefix .github/ISSUE_TEMPLATE/,fault.yml wish.yml)
	"$(BIN)/check-jsonschema" --builtin-schema vendor.github-issue-config .github/ISSUE_TEMPLATE/config.yml
	"$(BIN)/check-jsonschema" --builtin-schema vendor.citation-file-format CITATION.cff

format: $(STAMPS)/lint-tools
	"$(BIN)/ruff" check --fix .
	"$(BIN)/ruff" format .
	"$(BIN)/clang-format" -i $(CPP_FILES)

$(STAMPS)/docs-tools: pyproject.toml $(STAMPS)/built
	"$(BIN)/python" -m pip install --quiet --no-build-isolation -e '.[docs]'
	@touch $@

# Pages are read anew each time, so that what depends on another page is never old. Warnings are errors.
docs: $(STAMPS)/docs-tools
	rm -rf build/docs
	"$(BIN)/python" -m sphinx --fail-on-warning --keep-going --quiet --jobs auto --conf-dir docs/site \
		--doctree-dir build/docs/doctrees . build/docs/html
	@echo "build/docs/html/index.html"

# It needs chromium and chromedriver (Debian: apt install chromium chromium-driver).
docs-test: docs
	"$(BIN)/python" -m pytest tests/site $(ARGS)

comma := ,
# The C++ unit tests compile the library a second time, without Python.
$(STAMPS)/cpp-tools: pyproject.toml $(STAMPS)/built
	"$(BIN)/python" -m pip install --quiet --no-build-isolation -e '.[cpp]'
	@touch $@

#   make cpp-test SANITIZE=thread               looks for races; SANITIZE=address,undefined for wrong accesses
SANITIZE ?=
CPP_BUILD := build/cmake$(if $(SANITIZE),-$(subst $(comma),-,$(SANITIZE)))
cpp-test: $(STAMPS)/cpp-tools
	"$(BIN)/cmake" -S . -B $(CPP_BUILD) -G Ninja -DPython3_EXECUTABLE="$(abspath $(BIN))/python" \
		-DCMAKE_MAKE_PROGRAM="$(abspath $(BIN))/ninja" $(if $(SANITIZE),-DCMAKE_BUILD_TYPE=RelWithDebInfo \
		-DCMAKE_CXX_FLAGS="-fsanitize=$(SANITIZE) -fno-sanitize-recover=all")
	"$(BIN)/cmake" --build $(CPP_BUILD)
	cd $(CPP_BUILD) && "$(abspath $(BIN))/ctest" --output-on-failure --parallel "$$(getconf _NPROCESSORS_ONLN)"

# nvcc compiles the CUDA kernels for every architecture; that needs no GPU.   (ARGS="--sparse" takes less time)
cuda-check: $(STAMPS)/built
	"$(BIN)/python" scripts/cuda_compile_check.py $(ARGS)

# The PTX machine needs a torch with CUDA; it is in an environment of its own, which .ci/run uses, too.
PTX_TORCH ?= torch==2.14.1
PTX_ENV ?= .ci-venv
$(PTX_ENV)/bin/pytest:
	@[ -x "$(PTX_ENV)/bin/python" ] || $(PYTHON3) -m venv "$(PTX_ENV)"
	"$(PTX_ENV)/bin/python" -m pip install --no-cache-dir $(PTX_TORCH) ninja 'setuptools>=77' 'pytest>=8,<9.2' \
		'pytest-xdist>=3.5' numpy matplotlib seaborn nbformat nbclient ipykernel

ptx-test: $(PTX_ENV)/bin/pytest
	PATH="$(abspath $(PTX_ENV))/bin:$$PATH" "$(PTX_ENV)/bin/python" simulators/ptx_machine/run.py $(ARGS)

ptx-quick: $(PTX_ENV)/bin/pytest
	PATH="$(abspath $(PTX_ENV))/bin:$$PATH" "$(PTX_ENV)/bin/python" simulators/ptx_machine/run.py --quick $(ARGS)

ARM64 = PATH="$(abspath $(BIN)):$$PATH" "$(BIN)/python" scripts/arm64/run.py
arm64-check: $(STAMPS)/cpp-tools
	$(ARM64) build
	$(ARM64) cpp $(ARGS)
	$(ARM64) check

arm64-test: $(STAMPS)/cpp-tools
	$(ARM64) build
	$(ARM64) --cpu max test $(ARGS)

arm64-wheel: build/wheel $(STAMPS)/cpp-tools
	$(ARM64) build
	$(ARM64) wheel build/wheel
	$(REPAIR)

CLANG = "$(BIN)/python" -m pip install --quiet ziglang==0.17.1
arm64-model: $(STAMPS)/built
	$(CLANG)
	"$(BIN)/python" scripts/arm64/model.py

macos-check: $(STAMPS)/built
	$(CLANG)
	"$(BIN)/python" scripts/macos_check.py

$(STAMPS)/wheel-tools: pyproject.toml $(STAMPS)/built
	"$(BIN)/python" -m pip install --quiet --no-build-isolation -e '.[wheel]'
	@touch $@

# A manylinux wheel is for this Python and every supported torch. It uses the libraries of torch and of CUDA that torch
# has loaded by then, and holds no copies; kernels run on torch's own threads, so there is no OpenMP in it.
ifeq ($(shell uname -s),Darwin)
REPAIR = PATH="$(abspath $(BIN)):$$PATH" delocate-wheel --exclude libtorch --exclude libc10 --wheel-dir dist build/wheel/*.whl
else
REPAIR = PATH="$(abspath $(BIN)):$$PATH" auditwheel repair --exclude 'libtorch*' --exclude 'libc10*' \
	--exclude 'libcudart.so*' --wheel-dir dist build/wheel/*.whl
endif
build/wheel: $(STAMPS)/wheel-tools
	rm -rf build/wheel
	"$(BIN)/python" -m pip wheel --quiet --no-build-isolation --no-deps --wheel-dir build/wheel .

wheel: build/wheel
	$(REPAIR)

# All wheels share their object files, but for those of csrc/python.
wheels: build/wheel
	"$(BIN)/python" scripts/wheels.py add build/wheel $(PYTHONS)
	$(REPAIR)
	"$(BIN)/python" scripts/wheels.py try dist $(PYTHONS)

sdist: build
	"$(BIN)/python" setup.py --quiet sdist

clean:
	rm -rf build dist *.egg-info selfattn_ext/_C.*.so .pytest_cache .mypy_cache .ruff_cache
