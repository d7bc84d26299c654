# Every target sets itself up: `make demo` or `make test` is the first and only command a fresh clone needs.
PYTHON ?= python3
VENV := .venv
INSTALLED := $(VENV)/.installed
PYTEST := $(VENV)/bin/python -m pytest
# One BLAS thread a worker: the tests run in parallel processes.
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1

FACES := gan-face-generate==1.1.1

.PHONY: help demo faces test test-slow lint docs format clean $(VENV)

help:
	@echo "make demo       install, then condition the shipped digits generator on half images"
	@echo "make faces      install, then fetch a pretrained generator of faces (13 MB, PyPI: $(FACES))"
	@echo "make test       install, then run the tests (minutes)"
	@echo "make test-slow  install, then run the long statistical tests"
	@echo "make lint       install, then ruff and pyright"
	@echo "make docs       install, then write the documentation site to build/site"
	@echo "make format     install, then let ruff mend what it can"
	@echo "make clean      remove the installation, runs and caches"

$(INSTALLED): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("dgm-infer needs Python 3.11 or newer, this is " + sys.version.split()[0] + ": make PYTHON=python3.12 ...") if sys.version_info < (3, 11) else None'
	@echo "installing into $(VENV) (once; PyTorch is several GB)"
	@$(PYTHON) -m venv $(VENV)
	@$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --editable ".[test]"
	@touch $@

$(VENV): $(INSTALLED)

demo: $(INSTALLED)
	$(VENV)/bin/dgm-infer condition --config configs/condition/digits_top_half.yaml

# The package for its weights alone: what it needs to run, Python's version included, does not matter.
faces: $(INSTALLED)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --ignore-requires-python $(FACES)

test: $(INSTALLED)
	$(ONE_THREAD) $(PYTEST) -n 2 --dist loadfile -m "not slow"

test-slow: $(INSTALLED)
	$(ONE_THREAD) $(PYTEST) -n 2 --dist worksteal -m slow --durations=40

lint: $(INSTALLED)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/pyright & packages=$$!; $(VENV)/bin/pyright --project pyright-tests.json; tests=$$?; wait $$packages && exit $$tests

docs: $(INSTALLED)
	@$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --editable ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict

format: $(INSTALLED)
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

clean:
	rm -rf $(VENV) runs .pytest_cache .ruff_cache
