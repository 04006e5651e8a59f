# Each target works alone on a fresh machine with Python 3.11 to 3.13: it makes .venv, installs the locked
# dependencies and compiles the gRPC API first, and only when something of that has changed.

VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
ARGS ?=
SOAK_SECONDS ?= 1800
TRACES ?= traces
FUZZ_SECONDS ?= 60

# The first of these that runs and is new enough.
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11; do \
	$$python -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null && echo $$python && break; done)

.DEFAULT_GOAL := help
.PHONY: help test demo lint format bench test-kube test-browser test-image test-engine test-faults test-slow laws soak fuzz studies docs sbom audit protos lock clean

help:  ## list these targets
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 22

test: $(READY)  ## run the tests (under five minutes)
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist worksteal $(ARGS)

demo: $(READY)  ## four engines, Picker and a real Envoy on this machine, with a live view
	$(BIN)/picker demo $(ARGS)

lint: $(READY)  ## ruff and mypy --strict
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)  ## let ruff write the code as it likes it
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)  ## what a request costs, against baselines of the same run; ARGS=--write keeps it
	$(BIN)/python -m tests.benchmarks $(ARGS)

test-kube: $(READY)  ## against a real kube-apiserver and etcd
	tests/kube/assets/build
	PICKER_REQUIRE_KUBE=1 $(BIN)/python -m pytest -m kube $(ARGS)

test-browser: $(READY)  ## the dashboard in a headless Chromium
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || \
		{ apt-get -qq update && apt-get -qq install -y --no-install-recommends chromium fonts-dejavu-core; }
	$(BIN)/python -m pytest tests/admin -m browser $(ARGS)

test-image: $(READY)  ## what the image holds: the Dockerfile's steps, taken without Docker (a minute or two)
	$(BIN)/python -m pytest -m image $(ARGS)

test-engine: $(READY)  ## against a real vLLM
	$(BIN)/python -m pytest -m engine $(ARGS)

test-faults: $(READY)  ## one fault after the other, with a real Envoy (a minute or two)
	$(BIN)/python -m pytest tests/faults -m slow -n 2 --dist worksteal $(ARGS)

test-slow: $(READY)  ## the tests that take minutes
	$(BIN)/python -m pytest -m slow $(ARGS)

laws: $(READY)  ## the queue's laws over a million random decisions (minutes)
	PICKER_LAW_EXAMPLES=1500 PICKER_LAW_DECISIONS=1000000 \
		$(BIN)/python -m pytest tests/queueing/test_laws.py tests/queueing/test_fairness_law.py $(ARGS)

soak: $(READY)  ## mixed load with faults for SOAK_SECONDS
	PICKER_SOAK_SECONDS=$(SOAK_SECONDS) $(BIN)/python -m pytest -m soak -s $(ARGS)

fuzz: $(READY)  ## each place where bytes of others come in, for FUZZ_SECONDS; led by coverage where atheris is there
	$(BIN)/python -m tests.fuzz --seconds $(FUZZ_SECONDS) $(ARGS)

studies: $(READY)  ## renew picker/simulation/STUDIES.md from the public traces in TRACES; half an hour
	$(BIN)/picker study ladder --write
	$(BIN)/picker study classes --traces $(TRACES) --write
	$(BIN)/picker study comparison --traces $(TRACES) --write

docs: $(READY)  ## write the generated references anew
	$(BIN)/picker reference --write

sbom: $(READY)  ## write the SBOM and the list of licences anew, from the lock
	$(BIN)/python -m supply_chain

audit: $(READY)  ## look the locked versions up among known vulnerabilities; needs the network
	$(BIN)/uv tool run pip-audit --requirement requirements.lock --disable-pip --require-hashes

protos: $(READY)  ## compile the gRPC API
	$(BIN)/python setup.py -q build_protos

lock: $(READY)  ## choose the locked versions anew
	$(BIN)/uv pip compile --quiet --universal --upgrade --python-version 3.11 --extra test \
		--generate-hashes --no-annotate --no-header pyproject.toml --output-file requirements.lock

clean:  ## remove the virtual environment, what was generated and every cache
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis tests/.artifacts
	rm -f picker/api/v1/*_pb2*
	find picker tests -name __pycache__ -prune -exec rm -rf {} +

$(READY): requirements.lock pyproject.toml setup.py $(wildcard protos/picker/*/*.proto)
ifeq ($(PYTHON),)
	$(error Picker needs Python 3.11, 3.12 or 3.13; say which with make PYTHON=/path/to/python)
endif
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --requirement requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps --no-build-isolation --editable .
	@touch $(READY)
