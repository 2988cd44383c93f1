# make serve    set up, fetch the default model, serve it on 127.0.0.1:8000
# make test     set up, then ruff, mypy and the tests
# make interop  other people's clients, unmodified, against the server, in venvs of their own (2 GB; needs npm)
# make schemathesis    ten minutes of whatever /openapi.json allows and forbids
# make model    fetch the default model into the user's cache and print its folder
# make gpu      on a machine with a GPU: the tests that need one, with the python3 that holds its torch (GPU_PY)
# make gpu-figures   there too: every figure of the README and bench/RESULTS.md
# make soak     half an hour of mixed load on a real server (MINUTES=30): memory, sockets, tasks and pages stay flat
# make storm    five minutes of clients that leave within 50 ms, a thousand a second (STORM_S=300)
# make timings  whether the time of an answer tells of a key or of another's prompt (PAIRS=10000)
# make interpreters  attacks, endings and cases on a server under -O, the first two under -X dev -W error too
# make overload ten times what the server can do, for five minutes (OVERLOAD_S=300)
# make cases    the gravest public bug reports, tried on a running server
# make fuzz     the readers of requests and events under atheris, ten minutes each (FOR=600)
# make prove    the scheduler's state machine, a hundred times as long as in the suite
# make lint     ruff and mypy alone;  make fmt  what ruff can mend
#
#   make serve PORT=9000 MODEL=./folder ARGS='--no-overlap'

PYTHON ?= python3
HOST   ?= 127.0.0.1
PORT   ?= 8000
MODEL  ?=
ARGS   ?=

# torch goes first and pinned: a range (torch>=2.9,<2.14) takes whatever is newest where pip looks, and that may be a
# CUDA build of gigabytes, while a pin takes the CPU build of just this version wherever pip knows of one. For another
# build: make serve TORCH='torch==2.9.1 --index-url ...'
TORCH  ?= torch==2.13.0

VENV := .venv
PY   := $(VENV)/bin/python
PIP  := $(PY) -m pip --disable-pip-version-check

.PHONY: serve test interop schemathesis interop-tests model lint fmt gpu gpu-figures gpu-memcheck soak storm timings interpreters overload cases fuzz prove
.DELETE_ON_ERROR:

serve: $(VENV)/.installed
	@test -n "$(MODEL)" || $(PY) -m asyncllm.hub > /dev/null
	@exec $(PY) -m asyncllm serve $(if $(MODEL),"$(MODEL)") --host $(HOST) --port $(PORT) $(ARGS)

test: lint
	@$(PY) -m asyncllm.hub > /dev/null
	$(PY) -m pytest $(ARGS)

# In venvs of their own, as their pins are not ours. A client that is not there fails, as elsewhere it would be skipped.
# Those whose pins clash with each other's have homes, as tests/interop/homes says.
HOMES := node $(basename $(notdir $(wildcard tests/interop/homes/*.txt)))

interop: $(HOMES:%=.interop/%/.installed)
	@$(MAKE) --no-print-directory VENV=.venv-interop interop-tests

schemathesis: .interop/schemathesis/.installed
	@$(MAKE) --no-print-directory VENV=.venv-interop interop-tests \
	  ARGS='-k schemathesis --timeout=1200 $(ARGS)' ASYNCLLM_FUZZ_S=$${ASYNCLLM_FUZZ_S:-600}

interop-tests: $(VENV)/.interop
	$(PY) -m pytest tests/interop --no-skips -rs $(ARGS)

# Nothing is installed: a GPU machine's torch is its own. Checkpoints are looked for in .gpu/ (ASYNCLLM_TINY,
# ASYNCLLM_REAL say where else); what is not there is skipped. ASYNCLLM_STORM_S: seconds of the storm, 300.
GPU_PY ?= python3

gpu:
	@test ! -f .gpu/random_checkpoint.py || test -d .gpu/qwen3-0.6b || \
	  $(GPU_PY) .gpu/random_checkpoint.py qwen3-0.6b .gpu/qwen3-0.6b
	$(GPU_PY) -m pytest tests/gpu $(ARGS)

# The figures of README.md and bench/RESULTS.md, one JSON line each: some ten minutes.
FIGURES ?= figures.jsonl
SMALL   ?= .gpu/qwen3-0.6b
LARGE   ?= .gpu/qwen3-8b
CONTEXT := --option max_model_len=4096

gpu-figures:
	@for model in $(SMALL) $(LARGE); do test -d $$model || \
	  $(GPU_PY) .gpu/random_checkpoint.py $$(basename $$model) $$model; done
	set -e; { \
	  $(GPU_PY) -m bench.burst $(SMALL) --work one burst prefill shared penalties logprobs schema $(CONTEXT); \
	  $(GPU_PY) -m bench.burst $(SMALL) --work burst --burn $(CONTEXT); \
	  $(GPU_PY) -m bench.burst $(SMALL) --work burst --no-overlap $(CONTEXT); \
	  $(GPU_PY) -m bench.rival $(SMALL); \
	  $(GPU_PY) -m bench.burst $(LARGE) --work one burst $(CONTEXT); \
	  $(GPU_PY) -m bench.stall $(LARGE); \
	  $(GPU_PY) -m bench.step $(SMALL) --picture $(dir $(FIGURES))step.png $(CONTEXT); \
	  $(GPU_PY) -m bench.kernels; \
	  $(GPU_PY) -m bench.served $(SMALL) $(CONTEXT); \
	} > $(FIGURES)
	@cat $(FIGURES)

# Every load and store of a short run checked; minutes for what takes seconds without.
gpu-memcheck:
	compute-sanitizer --tool memcheck --error-exitcode 9 \
	  $(GPU_PY) -m pytest tests/gpu/test_graphs.py -k "mixed or stop_ids or entry_holds" $(ARGS)

# What takes too long for every run of the suite; docs/reliability.md says what each of them shows.
MINUTES    ?= 30
OVERLOAD_S ?= 300
STORM_S    ?= 300
PAIRS      ?= 10000
FOR        ?= 600

soak: $(VENV)/.dev
	$(PY) -m tests.e2e.soak --minutes $(MINUTES) $(ARGS)

storm: $(VENV)/.dev
	$(PY) -m tests.e2e.storm --seconds $(STORM_S) $(ARGS)

timings: $(VENV)/.dev
	$(PY) -m tests.attacks.timings --pairs $(PAIRS)

interpreters: $(VENV)/.dev
	ASYNCLLM_PYTHON_FLAGS='-O' $(PY) -m pytest tests/attacks tests/e2e/test_endings.py tests/e2e/severity3.py $(ARGS)
	ASYNCLLM_PYTHON_FLAGS='-X dev -W error' $(PY) -m pytest tests/attacks tests/e2e/test_endings.py $(ARGS)

overload: $(VENV)/.dev
	@$(PY) -m asyncllm.hub > /dev/null
	$(PY) -m tests.e2e.overload --seconds $(OVERLOAD_S) $(ARGS)

cases: $(VENV)/.dev
	$(PY) -m pytest tests/e2e/severity3.py $(ARGS)

fuzz: $(VENV)/.dev
	@$(PIP) install --quiet atheris
	@for reader in sse json tree; do $(PY) -m tests.attacks.fuzz $$reader $(FOR) || exit 1; done

prove: $(VENV)/.dev
	ASYNCLLM_MACHINES=17000 $(PY) -m pytest tests/engine/test_machine.py --timeout 7200 $(ARGS)

model: $(VENV)/.installed
	@$(PY) -m asyncllm.hub

lint: $(VENV)/.dev
	$(PY) -m ruff check .
	$(PY) -m mypy

fmt: $(VENV)/.dev
	$(PY) -m ruff check --fix .

# The stamps, each after the one before it. The install is editable, so only pyproject.toml makes it old.

$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "make: $(PYTHON) must be Python 3.11 or newer; name one: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -m venv --clear $(VENV) || \
	  { echo "make: $(PYTHON) cannot make a venv; Debian and Ubuntu keep that in the package python3-venv" >&2; exit 1; }
	@touch $@

# Without its dependencies, which come with the rest: so this line alone shows a bar, for the one large file.
$(VENV)/.torch: $(VENV)/.python
	@$(PIP) install --no-deps $(TORCH)
	@touch $@

$(VENV)/.installed: $(VENV)/.torch pyproject.toml
	@echo "installing asyncllm and what it needs: a minute or two"
	@$(PIP) install --quiet --editable .
	@touch $@

$(VENV)/.dev: $(VENV)/.installed
	@echo "installing what the tests need: a minute"
	@$(PIP) install --quiet --editable '.[dev]'
	@touch $@

.interop/node/.installed: tests/interop/homes/package.json
	@echo "installing npm's clients"
	@mkdir -p $(@D) && cp $< $(@D)/ && npm --prefix $(@D) install --no-audit --no-fund --silent
	@touch $@

.interop/%/.installed: tests/interop/homes/%.txt tests/interop/constraints.txt
	@echo "installing $*"
	@$(PYTHON) -m venv --clear $(@D)
	@! grep -q '^torch' $< || $(@D)/bin/pip --disable-pip-version-check install --quiet --no-deps $(TORCH)
	@$(@D)/bin/pip --disable-pip-version-check install --quiet --no-compile --constraint tests/interop/constraints.txt -r $<
	@touch $@

$(VENV)/.interop: $(VENV)/.torch pyproject.toml tests/interop/constraints.txt
	@echo "installing asyncllm and the clients that it is tried with: a minute or two"
	@$(PIP) install --quiet --constraint tests/interop/constraints.txt --editable '.[test,interop]'
	@touch $@
