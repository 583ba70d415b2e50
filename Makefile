# Set-up, demo and tests. `make setup` makes .venv once; it runs again only when a requirements file or pyproject.toml
# changes. Another Python: `make setup PYTHON=python3.12`.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
BUSY := $(VENV)/.installing

.PHONY: setup demo test check peers

setup: $(STAMP)

# A package whose installation was cut short looks installed to pip, so a set-up that did not finish starts over with an
# empty environment; pip's cache keeps the downloads.
$(STAMP): requirements/torch.txt requirements/base.txt requirements/test.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make setup PYTHON=...")'
	@if [ -e $(BUSY) ] || ! $(PY) -m pip --version >/dev/null 2>&1; then $(PYTHON) -m venv --clear $(VENV); fi
	@touch $(BUSY)
	@echo 'Installing into $(VENV): 6 GB, a few minutes the first time.'
	$(PY) -m pip install --quiet -r requirements/torch.txt
	$(PY) -m pip install --quiet --no-deps -r requirements/base.txt -r requirements/test.txt
	$(PY) -m pip install --quiet --no-deps --no-build-isolation -e .
	@rm $(BUSY)
	@touch $@

demo: setup
	$(PY) launch.py --config demo

test: check
	$(PY) -m pytest -m "not gpu"

check: setup
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(PY) -m pyright  # no look-up of newer releases
	$(PY) -m pytest tests/test_layering.py

# What benchmarks compare against: an environment of its own, which also sees the packages of .venv.
peers: setup
	$(PY) -m venv --clear .venv-peers
	.venv-peers/bin/pip install --quiet --no-deps -r benchmarks/peers.txt
	$(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > \
	  $$(.venv-peers/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/shared.pth
