# Everything one does with a clone. `make` alone lists it.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
ARGS   ?=
# Two files of tests at a time: ranks wait for one another most of the time. PARALLEL= runs one at a time.
# In the order of folders: pytest-xdist would start files with few tests last, and these take the longest.
PARALLEL ?= -n 2 --dist loadfile --no-loadscope-reorder
# Tests start many processes, which would compile the whole package each.
unexport PYTHONDONTWRITEBYTECODE

# The package with what it needs, and the same with an extra of pyproject.toml.
PACKAGE := $(VENV)/.installed
BENCH   := $(VENV)/.installed-bench
DEV     := $(VENV)/.installed-dev
DOCS    := $(VENV)/.installed-docs
# Another version of torch, in its own environment.
TORCH      ?= 2.11.0
TORCH_VENV := .venv-torch-$(TORCH)

.DEFAULT_GOAL := help
.PHONY: help venv train bench test test-all test-clusters test-torch test-memory gpu-check docs pictures dist browser charts lint format clean

help:  ## list the targets
	@echo 'fullshard: fully sharded data parallel training for PyTorch'
	@echo
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 24

venv: $(DEV)  ## make .venv with the project and its development set (done once)

train: $(PACKAGE)  ## train a byte-level GPT, sharded over every core; options: make train ARGS="--steps 100"
	@$(BIN)/fullshard train $(ARGS)

bench: $(BENCH)  ## measure training steps beside those of every peer that is installed; make bench ARGS="--size 34m"
	@$(BIN)/python -m benchmarks.bench $(ARGS)

test: lint  ## linters, strict types and all tests but the slow ones
	$(BIN)/python -m pytest $(PARALLEL) $(ARGS)

test-all: lint  ## linters, strict types and every test
	$(BIN)/python -m pytest $(PARALLEL) -m '' $(ARGS)

test-clusters: $(DEV)  ## the tests that start clusters on this machine
	$(BIN)/python -m pytest -m clusters $(ARGS)

test-torch: $(TORCH_VENV)/.installed  ## the quick tests with another torch: make test-torch TORCH=2.11.0
	$(TORCH_VENV)/bin/python -m pytest $(PARALLEL) $(ARGS)

# Without the compiler's libstdc++, AddressSanitizer ends a process at the first C++ exception.
test-memory: $(DEV)  ## tests with AddressSanitizer, which needs gcc: make test-memory ARGS="tests/offload"
	LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libstdc++.so.6)" \
	ASAN_OPTIONS=detect_leaks=0:verify_asan_link_order=0:handle_segv=0:handle_abort=0:allocator_may_return_null=1 \
	    $(BIN)/python -m pytest $(ARGS)

docs: $(DOCS)  ## build the documentation into build/site; warnings are errors
	$(BIN)/python -m sphinx -q -W --keep-going -d build/doctrees docs build/site
	@echo 'Open build/site/index.html'

pictures: $(DEV)  ## draw the pictures of the documentation again, by dry runs
	PYTHONPATH=src $(BIN)/python docs/pictures.py

dist: $(DEV)  ## build the wheel and the source distribution into dist, and try them in an empty environment
	rm -rf dist
	$(BIN)/pyproject-build --outdir dist
	$(BIN)/python -m twine check --strict dist/*
	$(BIN)/python -m pytest -m '' tests/system/test_wheel.py

gpu-check:  ## check all claims on this machine's GPU, by $(PYTHON) as it is: results in one file
	@PYTHONPATH=src $(PYTHON) benchmarks/gpu_check.py $(ARGS)

browser:  ## install Debian's chromium, in which tests look at pages; they are skipped without one
	apt-get install --yes --no-install-recommends chromium

# Apache ECharts, as the page of a run holds it: the parts named in charts.js, from the npm registry, into one file.
ASSETS  := src/fullshard/report/assets
ECHARTS := echarts@6.1.0 zrender@6.1.0 tslib@2.3.0
charts:  ## make the page's charting library again from the npm registry; needs npm
	rm -rf build/charts && mkdir -p build/charts
	cp $(ASSETS)/charts.js build/charts/
	cd build/charts && npm install --silent --no-fund --no-audit --ignore-scripts $(ECHARTS) esbuild@0.28.2
	cd build/charts && npx esbuild charts.js --bundle --minify --format=iife --global-name=echarts --target=es2019 \
	    --legal-comments=none --banner:js="/*! $(ECHARTS): licences in echarts.LICENSE */" --outfile=echarts.min.js
	cp build/charts/echarts.min.js $(ASSETS)/
	( cat build/charts/node_modules/echarts/NOTICE; \
	  for it in echarts zrender tslib; do printf '\n\n==== %s ====\n\n' $$it; \
	  cat build/charts/node_modules/$$it/LICENSE*; done ) | sed 's/[[:space:]]*$$//' > $(ASSETS)/echarts.LICENSE

lint: $(DEV)  ## linters and strict types only
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(DEV)  ## rewrite the sources as the linter wants them
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove .venv and everything that can be made again; runs/ stays
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp is written last, so an installation that was cut short is taken up again; with an extra, the package is there
# as well. Compiling all of torch takes as long as installing it: that is for tests, which start many processes.
$(PACKAGE) $(BENCH) $(DOCS): options := --no-compile
$(BENCH): extra := [bench]
$(DEV): extra := [dev]
$(DOCS): extra := [docs]
$(PACKAGE) $(BENCH) $(DEV) $(DOCS): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	    echo "fullshard needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>/dev/null || echo missing)." >&2; \
	    echo "Name another one: make $(or $(MAKECMDGOALS),venv) PYTHON=python3.12" >&2; exit 2; }
	@rm -f $(PACKAGE) $@
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(options) -c constraints.txt -e '.$(extra)'
	@touch $(PACKAGE) $@

$(TORCH_VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(TORCH_VENV)
	grep -Ev '^(torch|setuptools)==' constraints.txt > $(TORCH_VENV)/constraints.txt  # torch limits both
	$(TORCH_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c $(TORCH_VENV)/constraints.txt \
	    'torch==$(TORCH)' -e '.[dev]'
	@touch $@
