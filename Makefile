# `make demo` and `make test` work from nothing: each makes .venv and installs what it needs, once.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
BROWSER := .venv/.browser
export OMP_NUM_THREADS ?= 1

.PHONY: demo test lint types pytest docs soak bench evidence clean

demo: $(INSTALLED)
	$(BIN)/hdet demo

test: lint types pytest

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(INSTALLED)
	$(BIN)/mypy

pytest: $(BROWSER)
	$(BIN)/python -m pytest -n 2 --dist loadfile

# The site, into site/; a test of `make test` builds it too.
docs: $(INSTALLED)
	$(BIN)/python docs/build.py

# What takes long, and packages that take minutes to install. DeepSpeed builds itself with the torch that is there.
soak: $(BROWSER)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[soak]'
	DS_BUILD_OPS=0 $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		--no-build-isolation deepspeed
	$(BIN)/python -m pytest -m soak --timeout 3600

bench: $(INSTALLED)
	$(BIN)/python benchmarks/overhead.py --write

evidence: $(INSTALLED)
	$(BIN)/python benchmarks/evidence.py all

$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

# The page of `hdet report` is tested in a real browser: Chromium or Chrome, found or installed.
$(BROWSER): $(INSTALLED)
	$(BIN)/python tests/browser.py
	touch $@

clean:
	rm -rf .venv
