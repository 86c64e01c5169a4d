# Everything runs from .venv, which each target makes and keeps up to date by itself.
PYTHON ?= python3
ARGS ?=
VENV ?= .venv
BIN := $(VENV)/bin
INPUTS := pyproject.toml constraints.txt src/h3mlp/_version.py

# The compiler of the GPU kernels: for the CUDA version of this machine's driver, none without a GPU.
# make EXTRA=cu12 chooses by hand.
EXTRA ?= $(shell nvidia-smi 2>/dev/null | sed -n 's/.*CUDA[A-Za-z ]*Version: *\([0-9][0-9]*\).*/\1/p' | \
  awk 'NR == 1 { print ($$1 < 13 ? "cu12" : "cu13") }')
COMMA := ,

.PHONY: demo test gpu-test kernels bench doctor format clean

demo: $(VENV)/plain.stamp  ## run one real-size layer and check it; ARGS='--rows 64 --plot error.png'
	@$(BIN)/h3mlp demo $(ARGS)

doctor: $(VENV)/plain.stamp  ## which backend serves this machine
	@$(BIN)/h3mlp doctor $(ARGS)

test: $(VENV)/dev.stamp  ## ruff and pytest; ARGS='-k operator'
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pytest --numprocesses 2 --dist loadgroup$(if $(ARGS), $(ARGS))

gpu-test: $(VENV)/dev.stamp  ## the tests that need a GPU; ARGS='-k same_bits'
	$(BIN)/pytest tests/gpu$(if $(ARGS), $(ARGS))

kernels: $(VENV)/dev.stamp  ## compile the GPU kernels, without a GPU, and read their machine code; ARGS='--arch sm_90a'
	@$(BIN)/h3mlp kernels $(ARGS)

bench: $(VENV)/dev.stamp  ## the operator beside its peers; ARGS='--rows 256'
	@$(BIN)/h3mlp bench $(ARGS)

format: $(VENV)/dev.stamp
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .venv-cu12

# Debian's python3 comes without the pip that venv wants to copy: then the system's pip installs one.
$(VENV)/python.stamp:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit("h3mlp needs Python 3.10 or newer; $(PYTHON) is " + sys.version.split()[0])'
	@$(PYTHON) -m venv --clear $(VENV) 2>/dev/null || { \
	  $(PYTHON) -m venv --clear --without-pip $(VENV) && \
	  $(PYTHON) -m pip install --target "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" pip; \
	} || { rm -rf $(VENV); exit 1; }
	@touch $@

$(VENV)/plain.stamp: $(VENV)/python.stamp $(INPUTS)
	$(BIN)/python -m pip install --constraint constraints.txt --editable '.[plot$(addprefix $(COMMA),$(EXTRA))]'
	@touch $@

$(VENV)/dev.stamp: $(VENV)/python.stamp $(INPUTS)
	$(BIN)/python -m pip install --constraint constraints.txt --editable '.[dev,$(or $(EXTRA),cu13)]'
	@touch $@ $(VENV)/plain.stamp
