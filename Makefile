# make demo: train CE and GNL on digits with wrong labels. make test: lint and tests. Both make .venv themselves.
PYTHON ?= python3
WORKERS ?= 2
BIN := .venv/bin

.PHONY: demo test lint venv clean

demo: venv
	$(BIN)/torchrun --standalone --nproc-per-node=$(WORKERS) launchers/webvision.py --data demo --compare --out runs/demo $(ARGS)

test: venv lint
	$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@# mypy does not know that kernels/ is fastgnl.kernels: lay the tree out as it is installed.
	@rm -rf build/typed && mkdir -p build/typed && cp -r fastgnl build/typed/fastgnl && cp -r kernels build/typed/fastgnl/kernels
	$(BIN)/mypy build/typed/fastgnl

venv: .venv/ready

.venv/ready: pyproject.toml constraints.txt .ci/venv.sh
	@PYTHON="$(PYTHON)" sh .ci/venv.sh

clean:
	rm -rf .venv build *.egg-info
