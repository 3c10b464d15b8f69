# Needs Python >= 3.11 with pip, and make. See `make help`.
PYTHON ?= python3
VENV_ARGS ?=
WHEELHOUSE ?= wheelhouse
WHEELHOUSE_PYTHON ?= 3.12
WHEELHOUSE_PLATFORM ?= manylinux_2_28_x86_64

# Tools run as modules: where a venv sees the system's packages, their scripts are in the system's bin folder.
PY := .venv/bin/python
# The plugin must come ahead of those that are installed, and so ahead of conftest.py.
PYTEST := $(PY) -m pytest -p tests.plain_addresses
# A file is a worker's: the cells of a notebook share a kernel, and tests their fixtures. Many tests wait for processes
# that they start, so three workers are right for two cores.
PARALLEL := -n 3 --dist loadfile

# The tests start hundreds of processes: each would compile again what it imports of the project.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help lab test cost hunt thorough elsewhere prices lint matrix outsiders corpus site browser bench refresh lock wheelhouse clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

lab: .venv/installed  ## open the workbook in JupyterLab (LAB_ARGS=--no-browser)
	$(PY) -m jupyterlab --LabApp.default_url=/lab/tree/notebooks/00_start_here.ipynb $(LAB_ARGS)

test: lint  ## lint, then the tests and every notebook, in five minutes (PYTEST_ARGS="-k steps" for some of them)
	$(PYTEST) $(PARALLEL) $(PYTEST_ARGS)

cost: .venv/installed  ## what `make test` costs, in imports of torch, on an idle machine
	$(PY) tests/cost.py $(MAKE) test

# Runs that nobody wrote, held against plain torch and against the run that was not stopped.
MINUTES ?= 10
SEED ?= 1
hunt: .venv/installed  ## search for a run that breaks a promise (MINUTES=10 SEED=1)
	$(PY) -m tests.hunt --minutes $(MINUTES) --seed $(SEED)

thorough: lint  ## the same with what is marked `thorough`, every random case, and five seeds of rounding noise
	$(PYTEST) $(PARALLEL) --thorough $(PYTEST_ARGS)

METHOD ?= spawn
elsewhere: .venv/installed  ## as on macOS and Windows: workers and ranks are spawned (METHOD=forkserver: Python 3.14)
	PYTHONPATH=$(CURDIR)/tests/pretended/elsewhere REHEARSED_START_METHOD=$(METHOD) $(PYTEST) $(PARALLEL) --durations=10 $(PYTEST_ARGS)

JOB ?=
FAULT ?=
SEEDS ?= 0-7
PROCESSES ?= 2
prices: .venv/installed  ## measure what each fault costs, from where it was (JOB=gpt FAULT=tail_leaked SEEDS=0-7 PROCESSES=1)
	$(PY) -m workbook.prices --job "$(JOB)" --fault "$(FAULT)" --seeds $(SEEDS) --processes $(PROCESSES)

lint: .venv/installed  ## ruff, and mypy over course_lib, rehearse and workbook
	$(PY) -m ruff check .
	$(PY) -m mypy

# Each environment: its Python (a version, or a path), and how the versions of its packages are chosen.
ENVIRONMENTS ?= lowest locked newest
PYTHON_lowest ?= 3.12
PYTHON_locked ?= 3.11
PYTHON_newest ?= 3.13
VERSIONS_lowest ?= --resolution lowest-direct
VERSIONS_locked ?= --constraints requirements.lock
VERSIONS_newest ?= --resolution highest

matrix: $(ENVIRONMENTS:%=matrix-%)  ## the tests and notebooks with the lowest, locked and newest versions (ENVIRONMENTS=newest)

matrix-%: .venv/pyvenv.cfg
	$(PY) -m pip install --quiet uv
	mkdir -p .matrix
	$(PY) -m uv venv --quiet --allow-existing --python $(PYTHON_$*) .matrix/$*
	$(PY) -m uv pip compile requirements.txt --quiet --no-header --no-annotate --no-emit-package every-batch-counts \
	  --python .matrix/$*/bin/python $(VERSIONS_$*) --upgrade --output-file .matrix/$*.txt
	$(PY) -m uv pip install --quiet --compile-bytecode --python .matrix/$*/bin/python -r .matrix/$*.txt editables pip
	$(PY) -m uv pip install --quiet --python .matrix/$*/bin/python --no-deps -e .
	.matrix/$*/bin/python -m ipykernel install --sys-prefix
	grep -E '^(torch|lightning|numpy)==' .matrix/$*.txt
	.matrix/$*/bin/python -m pytest $(PARALLEL) $(PYTEST_ARGS)

outsiders: .venv/pyvenv.cfg  ## the tests with others' libraries: transformers, accelerate, torchdata, MONAI ...
	$(PY) -m pip install --quiet uv
	$(PY) -m uv venv --quiet --allow-existing --python $(PYTHON_locked) .outsiders
	$(PY) -m uv pip compile requirements.txt tests/outsiders/requirements.txt --quiet --no-header --no-annotate \
	  --no-emit-package every-batch-counts --python .outsiders/bin/python $(VERSIONS_locked) --output-file .outsiders/versions.txt
	$(PY) -m uv pip install --quiet --compile-bytecode --python .outsiders/bin/python -r .outsiders/versions.txt editables pip
	$(PY) -m uv pip install --quiet --python .outsiders/bin/python --no-deps -e .
	.outsiders/bin/python -m pytest tests/outsiders $(PYTEST_ARGS)

# Clones are read from CORPUS/owner/name; a commit that is missing there is fetched from its public address.
CORPUS ?= .corpus
corpus: .venv/installed  ## judge public scripts against what is true of them (CORPUS=clones SCRIPTS=mnist)
	$(PY) -m pip install --quiet -r tests/corpus/requirements.txt -c requirements.lock
	$(PY) -m tests.corpus --clones $(CORPUS) $(SCRIPTS)

# Static: it shows the stored outputs and reads the docstrings, so its environment has no torch.
site: .site/installed  ## the book to read, in site/: chapters, symptoms, API, claims (open site/index.html)
	NO_MKDOCS_2_WARNING=1 .site/bin/python -m mkdocs build --quiet --strict --config-file docs/mkdocs.yml

browser: .venv/installed site  ## the site, and the notebooks in JupyterLab, tried in Chromium
	$(PY) -m pip install --quiet -r tests/browser/requirements.txt -c requirements.lock
	$(PYTEST) tests/browser -m browser $(PYTEST_ARGS)

bench: .venv/installed  ## the benchmarks, for an idle machine
	$(PYTEST) tests/bench -o 'python_files=bench_*.py' -s $(PYTEST_ARGS)

refresh: .venv/installed  ## run the notebooks and store their outputs (N=05 for one of them)
	$(PY) -m workbook.refresh $(N)

lock: .venv/pyvenv.cfg  ## lock versions within requirements.txt (LOCK_ARGS=--upgrade for the newest)
	$(PY) -m pip install --quiet uv
	printf 'torch==2.13.0\nhatchling\neditables\n' | $(PY) -m uv pip compile requirements.txt - --universal \
	  --python-version 3.11 --no-header --no-annotate --no-emit-package every-batch-counts \
	  --quiet --output-file requirements.lock $(LOCK_ARGS)

# pip compares manylinux tags by name, so every older one that the platform accepts is listed.
GLIBC := $(word 3,$(subst _, ,$(WHEELHOUSE_PLATFORM)))
ARCH := $(WHEELHOUSE_PLATFORM:manylinux_2_$(GLIBC)_%=%)
PLATFORMS := $(foreach minor,$(shell seq $(GLIBC) -1 5),manylinux_2_$(minor)_$(ARCH)) \
  $(foreach year,2014 2010 1,manylinux$(year)_$(ARCH))

wheelhouse: .venv/pyvenv.cfg  ## download all but torch for a machine that has torch and no network
	$(PY) -m pip install --quiet uv
	mkdir -p $(WHEELHOUSE)
	$(PY) -m uv pip compile requirements.lock --no-deps --no-header --no-annotate --quiet \
	  --python-version $(WHEELHOUSE_PYTHON) --python-platform $(ARCH)-manylinux_2_$(GLIBC) \
	  | grep -Ev '^(torch|triton|cuda-.*|nvidia-.*)==' > $(WHEELHOUSE)/requirements.txt
	$(PY) -m pip download --no-deps --only-binary=:all: --dest $(WHEELHOUSE) -r $(WHEELHOUSE)/requirements.txt \
	  --python-version $(WHEELHOUSE_PYTHON) $(PLATFORMS:%=--platform %)
	@echo "$(WHEELHOUSE)/ is for Python $(WHEELHOUSE_PYTHON), $(WHEELHOUSE_PLATFORM); torch and its CUDA packages are" \
	  "left out. Copy it there and run: make test VENV_ARGS=--system-site-packages"

clean:  ## remove .venv and the caches
	rm -rf .venv .matrix .outsiders .corpus .site site .pytest_cache .mypy_cache .ruff_cache .hypothesis

# Each step is a line, and what goes wrong a sentence: install.py.
.venv/pyvenv.cfg:
	@command -v $(PYTHON) >/dev/null || { echo "There is no $(PYTHON) here. Python 3.11 or newer is needed:" \
	  "install one, and name it: make PYTHON=python3.12 lab" >&2; exit 1; }
	@$(PYTHON) install.py --only-venv $(VENV_ARGS)

.venv/installed: .venv/pyvenv.cfg requirements.txt requirements.lock pyproject.toml
	@WHEELHOUSE=$(WHEELHOUSE) $(PY) install.py
	@touch $@

.site/installed: docs/requirements.txt
	$(PYTHON) -m venv .site
	.site/bin/python -m pip install --quiet -r $<
	touch $@
