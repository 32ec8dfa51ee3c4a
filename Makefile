# make run     a virtual environment, then `python -m kvkern generate`
# make test    the same environment, then lint, types and every test
#
#   PYTHON=python3.12   the interpreter that makes the environment
#   VENV=               no environment: PYTHON has torch and the rest already, nothing is installed
#   ARGS="--seed 1"     further arguments of `generate` (run) or pytest (test)

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
CPU_TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

ifeq ($(strip $(VENV)),)
PY := $(PYTHON)
INSTALLED :=
else
PY := $(VENV)/bin/python
INSTALLED := $(VENV)/installed
endif

.PHONY: run test lint clean
.DELETE_ON_ERROR:

run: $(INSTALLED)
	$(PY) -m kvkern generate $(ARGS)

test: lint
	$(PY) -m pytest -n auto --dist worksteal $(ARGS)

lint: $(INSTALLED)
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(PY) -m mypy

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp goes first and comes back last, so an environment whose installation was cut short has
# none and is made anew; one that is merely older than its inputs is brought up to date.
#
# Without a GPU: the pinned torch as a CPU build, from a wheel that pip has at hand (find-links), or
# from PyTorch's index of CPU builds; PyPI's own Linux wheel would add gigabytes of CUDA.
# With a GPU: whatever PyPI's torch is, and the triton it asks for.
$(VENV)/installed: pyproject.toml constraints.txt
	test -f $@ || $(PYTHON) -m venv --clear $(VENV)
	rm -f $@
	if nvidia-smi -L >/dev/null 2>&1; then \
		grep -vE '^(torch|triton)==' constraints.txt >$(VENV)/constraints.txt; \
	else \
		cp constraints.txt $(VENV)/constraints.txt && \
		torch=$$(grep '^torch==' constraints.txt) && \
		{ $(PY) -m pip install --quiet --no-index --no-deps "$$torch" 2>/dev/null || \
		  $(PY) -m pip install --index-url $(CPU_TORCH_INDEX) "$$torch"; }; \
	fi
	$(PY) -m pip install --quiet --constraint $(VENV)/constraints.txt --editable '.[dev]'
	touch $@
