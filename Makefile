# SPDX-License-Identifier: Apache-2.0
#
# Every entry point. Each target sets up what it needs, does nothing twice (two runs at once wait for each
# other), and says in one sentence what is missing when it cannot. `make` alone lists them.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-builtin-rules

PYTHON ?= python3
MINOR ?= 1.36
XDG_CACHE_HOME ?= $(HOME)/.cache
CACHE := $(XDG_CACHE_HOME)/aliquot
VENV := .venv
BIN := $(VENV)/bin
PY := $(BIN)/python
export PYTHONDONTWRITEBYTECODE ?=
export PIP_DISABLE_PIP_VERSION_CHECK := 1

# `$(call once,NAME,COMMAND)`: COMMAND under a lock of that name, so that two runs do not build into each other.
once = mkdir -p build/locks && { flock -n -E 75 build/locks/$(1) $(2) || { test $$? = 75 && \
  echo "$(1): another run is at it; waiting" && flock build/locks/$(1) $(2); }; }
make_of = $(MAKE) -s --no-print-directory -j"$$(nproc)" PY=$(PY) -f $(1)

PYTEST := $(PY) -m pytest
MINORS := 1.34 1.36 1.37

##@ For people

.PHONY: help
help: ## List the targets
	@awk 'BEGIN {FS = ":.*## "} /^##@/ {printf "\n%s\n", substr($$0, 5)} \
	  /^[a-z0-9-]+:.*## / {printf "  %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@printf '\nVariables: MINOR=%s (Kubernetes of `test` and `demo`), KEEP=1 (`demo` leaves the cluster up), PYTHON=%s\n' '$(MINOR)' '$(PYTHON)'

.PHONY: demo
demo: root venv hook fakegpu ## Two pods share one (fake) card on a real Kubernetes; a minute of story (KEEP=1 leaves it up)
	@$(PY) -m aliquot.e2e.demo --minor $(MINOR) $(if $(KEEP),--keep)

.PHONY: test
test: venv hook fakegpu ## The tests: pure ones, the C libraries, and one real control plane (about 5 minutes warm)
	@[[ $$EUID = 0 ]] || echo "test: without root the tests of what runs as root on a node are left out; sudo make test runs all"
	@$(PY) e2e/tools/build.py control-plane --minor $(MINOR)
	$(PYTEST) tests --ignore=tests/e2e -n 3 --dist loadfile $(PYTEST_ARGS)
	$(if $(PYTEST_ARGS),,$(PY) tests/kube/run_other_client.py -q -n 2)

.PHONY: test-hook
test-hook: venv hook fakegpu ## The hook's tests only, its sources under the sanitizers among them
	$(PYTEST) tests/hook -n 2 --dist loadfile $(PYTEST_ARGS)

##@ Parts

.PHONY: apt
apt: ## Debian packages that the other targets need (does nothing where they are there)
	@$(call once,apt,scripts/apt.sh e2e/apt-packages.txt)

.PHONY: root
root: # said before anything is built for a quarter of an hour
	@[[ $$EUID = 0 || $${ALIQUOT_E2E_PROVIDER:-local} != local ]] || { \
	  echo "$(MAKECMDGOALS) makes network and mount namespaces and starts containers, so it needs root: run it with sudo" >&2; \
	  exit 1; }

.PHONY: venv
venv: $(VENV)/.ready ## The Python environment, from hash-pinned locks

$(VENV)/.ready: requirements/dev.txt pyproject.toml | apt
	@$(call once,venv,scripts/venv.sh $(PYTHON) $(VENV))

.PHONY: generate
generate: venv ## Generated files that are checked in: gRPC stubs
	$(PY) api/generate.py

.PHONY: headers
headers: venv ## cuda.h and nvml.h of three majors, and what they declare (build/symbols.json)
	@$(call once,headers,$(call make_of,fakegpu/build.mk) headers)

.PHONY: hook
hook: headers ## The hook: build/hook/libvgpu.so, libvgpu-strict.so, and the node's region library
	@$(call once,hook,$(call make_of,hook/build.mk))

.PHONY: fakegpu
fakegpu: headers ## The fake driver: build/fakegpu, a driver root with libcuda, libnvidia-ml and nvidia-smi
	@$(call once,fakegpu,$(call make_of,fakegpu/build.mk) fakegpu)

.PHONY: image
image: venv hook ## The driver's image and the examples', as OCI archives in build/
	@$(PY) -m aliquot.e2e.images

.PHONY: control-plane
control-plane: venv ## Kubernetes of all minors and kind, built once into the cache (five minutes each, cold)
	@for minor in $(MINORS); do $(PY) e2e/tools/build.py cluster --minor $$minor; done
	@$(PY) e2e/tools/build.py kind

##@ Checks

.PHONY: lint
lint: venv hook headers ## Formatting, style, floors, C analysis, licences; locks and stubs are what they come from
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	@scripts/lint-c.sh $(BIN)
	@scripts/lint-tree.sh
	@scripts/lock.sh --check
	$(PY) api/generate.py --check

.PHONY: format
format: venv ## Puts Python and C in our format
	$(BIN)/ruff format .
	git ls-files '*.c' '*.h' | xargs $(BIN)/clang-format -i

.PHONY: type
type: venv ## mypy, strict, for each Python we support
	@for v in 3.11 3.12 3.13 3.14; do echo "mypy --python-version $$v"; \
	  $(BIN)/mypy --python-version $$v --cache-dir $${XDG_CACHE_HOME:-$$HOME/.cache}/aliquot/mypy/$$v; done

.PHONY: e2e
e2e: root venv hook fakegpu control-plane ## The stories on real clusters of three Kubernetes minors
	$(PYTEST) tests/e2e -m 'not full' -n 3 $(PYTEST_ARGS)

.PHONY: e2e-full
e2e-full: root venv hook fakegpu control-plane ## The stories with every kill point on every minor (long)
	$(PYTEST) tests/e2e --timeout 1800 $(PYTEST_ARGS)

.PHONY: bench
bench: venv hook fakegpu ## The figures we publish, each beside a floor or peer of the same run
	@$(PY) e2e/tools/build.py cluster --minor $(MINOR)
	@$(call once,hook,$(call make_of,hook/build.mk) test-builds)
	@scripts/bench.sh $(PY)

.PHONY: bench-hook
bench-hook: venv hook fakegpu ## The figures of the hook only
	@$(call once,hook,$(call make_of,hook/build.mk) test-builds)
	@scripts/bench.sh $(PY) bench/hook/run.py

.PHONY: fuzz
fuzz: venv hook ## Ten million inputs each to what the hook reads of others (an hour; keeps a corpus in build/fuzz)
	ALIQUOT_FUZZ_ROUNDS=$(or $(ROUNDS),10000000) ALIQUOT_FUZZ_CORPUS=$(CURDIR)/build/fuzz \
	  $(PYTEST) tests/hook/test_hook_fuzz.py tests/hook/test_hook_limiter_pure.py -n 2 --dist load \
	  --timeout 3600 $(PYTEST_ARGS)

.PHONY: check
check: root lint type control-plane test e2e ## What decides whether a change lands

##@ House-keeping

.PHONY: lock
lock: venv ## Re-resolve requirements/*.txt from pyproject.toml
	@scripts/lock.sh

.PHONY: clean
clean: ## Remove what was built in this checkout (keeps the cache)
	rm -rf build dist .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache *.egg-info

.PHONY: clean-cache
clean-cache: ## Remove the cache of tools and images (building Kubernetes again takes a quarter of an hour)
	rm -rf "$(CACHE)"
