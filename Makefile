# kvmesh: `make demo` and `make test` are the only set-up there is.
SHELL := /bin/bash
.DEFAULT_GOAL := help

# The first interpreter that is new enough; override with `make PYTHON=/path/to/python3.12 test`.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && { echo "$$p"; break; }; done)
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
RUNNABLE := $(VENV)/.runnable

# what Ctrl-C while something is installed tells to run
$(INSTALLED) $(RUNNABLE): export INSTALL_AGAIN = make $(or $(MAKECMDGOALS),install)

.PHONY: help install demo test test-mesh test-vllm test-cluster check unit fuzz attack bench bench-routing bench-routing-peers bench-overload bench-scaling bench-faults docs reference lock dist try clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 22

install: $(INSTALLED) ## create .venv and install kvmesh into it, once

$(INSTALLED): pyproject.toml requirements-dev.lock | $(BIN)/python
	@$(BIN)/python tools/install_progress.py "kvmesh with its tests and tools" -r requirements-dev.lock
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@ $(RUNNABLE)

# What `make demo` needs is half of it, and waited for by who looks at kvmesh for the first time.
$(RUNNABLE): pyproject.toml requirements-dev.lock | $(BIN)/python
	@$(BIN)/python tools/install_progress.py "what builds kvmesh" --constraint requirements-dev.lock hatchling editables
	@$(BIN)/python tools/install_progress.py "kvmesh, Envoy and Redis" --constraint requirements-dev.lock \
		--no-build-isolation --editable '.[local]'
	@touch $@

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "kvmesh needs Python 3.11 or newer; install it or set PYTHON=/path/to/python" >&2; exit 1; }
	@"$(PYTHON)" -c 'import ensurepip' 2>/dev/null || { echo "$(PYTHON) has no ensurepip: install your system's python3-venv package" >&2; exit 1; }
	@echo "making $(VENV), once; all that is installed goes there"
	@"$(PYTHON)" -c 'import signal, sys, venv; stopped = "stopped; run the same command again to go on"; \
		signal.signal(signal.SIGINT, lambda *_: sys.exit(stopped)); venv.main(["$(VENV)"])'

# Where this is set, each of the hundreds of processes that tests start would compile every module anew.
unexport PYTHONDONTWRITEBYTECODE

# Processes that run tests, for two cores. Tests that start servers mostly wait for them: three take 11 min, two 14. The files
# go to them in the order given, and not by their number of tests: the longest test, alone in its file, would begin last.
TEST_WORKERS ?= 2
SERVER_TEST_WORKERS ?= 3
SERVER_TESTS = --numprocesses=$(SERVER_TEST_WORKERS) --dist=loadfile --no-loadscope-reorder

demo: $(if $(wildcard $(INSTALLED)),$(INSTALLED),$(RUNNABLE)) ## start the whole mesh on this machine; Ctrl-C ends it
	@$(BIN)/kvmesh up $(ARGS)

check: install ## format, lint, types, import contracts, unit tests
	@$(BIN)/ruff format --check --quiet . || { echo "run: $(BIN)/ruff format ." >&2; exit 1; }
	@$(BIN)/ruff check --quiet .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-cache 2>&1 | grep -vE '^(╔|║|╚|$$)' | tail -n 12; exit $${PIPESTATUS[0]}
	@$(BIN)/python -m pytest tests/unit -m "not thorough" --numprocesses=$(TEST_WORKERS)

unit: install ## the unit tests alone, all of them
	@$(BIN)/python -m pytest tests/unit --numprocesses=$(TEST_WORKERS)

test: check ## everything that needs no vLLM: unit, integration, end to end, browser, random kills
	@$(BIN)/python -m pytest tests/unit -m thorough --numprocesses=$(TEST_WORKERS)
	@$(BIN)/python -m pytest tests/chaos tests/e2e tests/reports tests/browser tests/integration --durations=15 $(SERVER_TESTS)
	@$(BIN)/python -m pytest tests/attack --durations=5  # alone: it compares times

attack: install ## what one client or one pod can do to the others: attacks on a whole mesh, innocents beside them
	@$(BIN)/python -m pytest tests/attack --durations=5

test-mesh: install ## what is installed, on a real istiod and API server (builds them with Go, once, into the cache)
	@$(BIN)/python -m tests.mesh.prepare  # outside of any test's time
	@unshare --net $(if $(filter 0,$(shell id -u)),,--map-root-user) \
		$(BIN)/python -m pytest tests/mesh_cluster  # pods have addresses of their own
	@$(BIN)/python -m pytest tests/mesh --durations=15 $(SERVER_TESTS)

test-vllm: install ## two real vLLM servers on the CPU behind the real stack (builds a cached environment)
	@$(BIN)/python -m tests.vllm.environment  # outside of any test's time
	@$(BIN)/python -m tests.sglang.environment
	@$(BIN)/python -m tests.mesh.prepare
	@unshare --net $(if $(filter 0,$(shell id -u)),,--map-root-user) \
		$(BIN)/python -m pytest tests/vllm_cluster  # pods have addresses of their own
	@$(BIN)/python -m pytest tests/vllm tests/sglang --durations=15

test-cluster: install ## what we expect of Kubernetes, against the cluster of $KUBECONFIG; makes and removes its own namespaces
	@test -n "$$KUBECONFIG" || { echo "set KUBECONFIG to a cluster in which definitions may be made" >&2; exit 1; }
	@$(BIN)/python -m pytest tests/cluster

# atheris has an environment of its own, kept beside the other caches: it instruments what it imports
FUZZ_SECONDS ?= 60
FUZZ_VENV = $(or $(KVMESH_CACHE),$(or $(XDG_CACHE_HOME),$(HOME)/.cache)/kvmesh)/fuzz-$(shell "$(PYTHON)" -c 'import sys; print("py%d%d" % sys.version_info[:2])')

fuzz: ## fuzz the event decoder for FUZZ_SECONDS, guided by coverage
	@test -x $(FUZZ_VENV)/bin/python || "$(PYTHON)" -m venv $(FUZZ_VENV)
	@$(FUZZ_VENV)/bin/python -c 'import atheris, msgspec, xxhash, kvmesh' 2>/dev/null || { \
		$(FUZZ_VENV)/bin/python -m pip install --quiet --disable-pip-version-check \
			--constraint requirements-dev.lock 'atheris>=3.0,<4' msgspec xxhash && \
		$(FUZZ_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .; }
	@$(FUZZ_VENV)/bin/python -m tests.fuzz.fuzz_vllm_events -max_total_time=$(FUZZ_SECONDS) $(FUZZ_ARGS)

bench: install ## how long a picker is away after a crash, and what it costs: latency, CPU a request, requests/s per core; what watching, tokens, hybrid models and prefill legs cost
	@$(BIN)/python -m bench.first_pick
	@$(BIN)/python -m bench.run $(ARGS)
	@$(BIN)/python -m bench.watched $(filter --quick,$(ARGS))
	@$(BIN)/python -m bench.tokenizing $(filter --quick,$(ARGS))
	@$(BIN)/python -m bench.token_ways $(filter --quick,$(ARGS))
	@$(BIN)/python -m bench.hybrid_index $(filter --quick,$(ARGS))
	@$(BIN)/python -m bench.prefill_leg $(filter --quick,$(ARGS))

bench-routing: install ## which routing is best: kvmesh, Envoy's own balancing, other routers, on the same load; prefill pods, when they pay
	@$(BIN)/python -m bench.routing.run $(ARGS)
	@$(BIN)/python -m bench.disaggregation.run $(filter --quick,$(ARGS))

bench-routing-peers: install ## install vllm-router and smg for bench-routing, into an environment of their own
	@$(BIN)/python -m bench.routing.peers

bench-overload: install ## who keeps their latency under overload: 0.5 to 3 times capacity, with priorities and without
	@$(BIN)/python -m bench.overload.run $(ARGS)

bench-scaling: install ## whether pods come in time: kvmesh's signal, Kubernetes' autoscaler, and who knows the future; virtual time
	@$(BIN)/python -m bench.scaling.run $(ARGS)

bench-faults: install ## for how long the index claims blocks that are gone, fault by fault; about 3 min
	@$(BIN)/python -m bench.faults.run $(ARGS)

docs: install ## build the site of docs/ into build/site; a broken link or anchor is an error
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "build/site/index.html"

reference: install ## write the generated parts of docs/ anew: command line, configuration, metrics, policy, pictures
	@$(BIN)/python -m tools.reference
	@$(BIN)/python -m tools.pictures

# its tools are many, and nothing else needs them
RELEASE_VENV = build/release

dist: ## what a release publishes, in dist/: wheel, source archive, and a list of the image's parts; checked
	@rm -rf dist
	@test -x $(RELEASE_VENV)/bin/twine || { "$(PYTHON)" -m venv $(RELEASE_VENV) && $(RELEASE_VENV)/bin/python -m pip \
		install --quiet --disable-pip-version-check -r tools/release.lock; }
	@$(RELEASE_VENV)/bin/python -m build --no-isolation >/dev/null
	@$(RELEASE_VENV)/bin/twine check --strict dist/*
	@$(RELEASE_VENV)/bin/check-wheel-contents dist/*.whl
	@$(RELEASE_VENV)/bin/python -W ignore::UserWarning -m cyclonedx_py requirements requirements-image.lock \
		--pyproject pyproject.toml --output-reproducible --output-file dist/kvmesh-image.cdx.json
	@ls -s dist

try: ## install the wheel of dist/ into a new environment of PYTHON, and serve a request with it
	@"$(PYTHON)" tools/try_wheel.py dist/*.whl

lock: install ## pin the development environment anew
	@$(BIN)/python -m pip install --quiet pip-tools
	@$(BIN)/pip-compile --quiet --strip-extras --no-emit-index-url --no-emit-find-links --no-emit-trusted-host \
		--extra dev --extra local --extra models --extra mistral --extra harmony --extra otel --extra docs --output-file requirements-dev.lock pyproject.toml
	@$(BIN)/pip-compile --quiet --strip-extras --no-emit-index-url --no-emit-find-links --no-emit-trusted-host \
		--output-file tools/release.lock tools/release.in

clean: ## remove what the targets made
	@rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
