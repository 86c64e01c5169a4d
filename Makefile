# Everything runs from .venv, which each target makes and keeps up to date by itself.
PYTHON ?= python3
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
INPUTS := pyproject.toml constraints.txt src/h3mlp/_version.py

.PHONY: demo test bench doctor format clean

demo: $(VENV)/plain.stamp  ## run one real-size layer and check it; ARGS='--rows 64 --plot error.png'
	@$(BIN)/h3mlp demo $(ARGS)

doctor: $(VENV)/plain.stamp  ## which backend serves this machine
	@$(BIN)/h3mlp doctor $(ARGS)

test: $(VENV)/dev.stamp  ## ruff and pytest; ARGS='-k operator'
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pytest$(if $(ARGS), $(ARGS))

bench: $(VENV)/dev.stamp  ## the operator beside its peers; ARGS='--rows 256'
	@$(BIN)/python -m benchmarks.cpu $(ARGS)

format: $(VENV)/dev.stamp
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV)

# Debian's python3 comes without the pip that venv wants to copy: then the system's pip installs one.
$(VENV)/python.stamp:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit("h3mlp needs Python 3.10 or newer; $(PYTHON) is " + sys.version.split()[0])'
	@$(PYTHON) -m venv --clear $(VENV) 2>/dev/null || { \
	  $(PYTHON) -m venv --clear --without-pip $(VENV) && \
	  $(PYTHON) -m pip install --target "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" pip; \
	} || { rm -rf $(VENV); exit 1; }
	@touch $@

$(VENV)/plain.stamp: $(VENV)/python.stamp $(INPUTS)
	$(BIN)/python -m pip install --constraint constraints.txt --editable '.[plot]'
	@touch $@

$(VENV)/dev.stamp: $(VENV)/python.stamp $(INPUTS)
	$(BIN)/python -m pip install --constraint constraints.txt --editable '.[dev]'
	@touch $@ $(VENV)/plain.stamp
