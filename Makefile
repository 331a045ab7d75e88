# make chat          talk to the default model; installs and fetches what that needs
# make test          all tests, except those that need an environment of their own
# make test-transformers, make test-optimum  exports through PyTorch, each in an environment of its own
# make test-oldest   the tests without weights, with the oldest packages that pyproject.toml allows
# make test-train    training of drafting heads, in an environment of its own with torch
# make test-serve    the server asked by openai, ollama, LiteLLM, LangChain and LlamaIndex, in an environment of its own
# make test-suites   tests of openai-python, Open Responses and llama.cpp for servers; SUITES=FOLDER has copies
# make test-npu      an emulator of an NPU, and OpenVINO on an Intel processor, in an environment of their own
# make test-webgpu   the WebGPU provider on a GPU in software, which it fetches
# make differential  tokens, chat templates and logits beside transformers, tokenizers and llama.cpp; PARTS=…
# make families      each family's logits, rows and texts in one table; FAMILIES=… for some of them
# make heads         drafting heads of published shapes beside the code of their formats; HEADS=… for some of them
# make check         formatting, lint, types
# make bench         decoding speed relative to a bare ONNX Runtime loop
# make check-models MODELS="FILE.gguf …"   export each in four precisions, check them, and print what they lose
# make wheel         a wheel in dist/, built from the sdist there, so that an old build/ adds nothing
# make clean         remove environments and build outputs

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Python modules are compiled when they are first imported, not all that pip installs (21 of 49 s of processor time).
INSTALL := -m pip install --quiet --disable-pip-version-check --no-compile
export PYTHONDONTWRITEBYTECODE :=

.PHONY: chat test test-oldest test-serve test-suites test-transformers test-optimum test-train test-webgpu test-npu differential families heads check types bench check-models wheel clean

chat: $(VENV)/.cpu
	@$(BIN)/edgespec chat

test: $(VENV)/.test
	$(BIN)/pytest -m "not webgpu and not npu and not traced and not train and not peers and not clients"

test-oldest: $(VENV)-oldest/.test
	$(VENV)-oldest/bin/pytest

test-serve: $(VENV)-serve/.test
	$(VENV)-serve/bin/pytest -m clients -n 0

# The suites are cloned by git, or read from a folder that has openai-python, openresponses and llama.cpp.
test-suites: $(VENV)-suites/.test
	$(VENV)-suites/bin/python scripts/foreign_suites.py $(if $(SUITES),--sources $(SUITES))

test-transformers test-optimum: test-%: $(VENV)-%/.test
	$(VENV)-$*/bin/pytest -m traced tests/export/test_traced.py

test-train: $(VENV)-train/.test
	$(VENV)-train/bin/pytest -m train

# On the machine's own GPU: EDGESPEC_TEST_WEBGPU=1 .venv/bin/pytest tests/hardware -m webgpu -n 0
test-webgpu: $(VENV)/.test
	$(BIN)/python scripts/software_gpu.py $(BIN)/pytest tests/hardware -m webgpu -n 0 -o faulthandler_timeout=1800

test-npu: $(VENV)-npu/.test
	$(VENV)-npu/bin/pytest tests/hardware -m npu -n 0

differential: $(VENV)-differential/.test
	PYTHONPATH=scripts:tests/support $(VENV)-differential/bin/python -m differential $(PARTS)

families: $(VENV)/.test
	PYTHONPATH=scripts:tests/support $(BIN)/python scripts/families_table.py $(FAMILIES)

# DeepSeek's code is no package: it is cloned, or read from a folder that has it.
heads: $(VENV)-heads/.test
	PYTHONPATH=scripts:tests/support $(VENV)-heads/bin/python scripts/heads_table.py \
		--deepspec $(or $(DEEPSPEC),$(VENV)-heads/DeepSpec) $(HEADS)

check: $(VENV)/.test types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/mypy demos
	$(BIN)/mypy scripts
	$(BIN)/mypy bench

bench: $(VENV)/.test
	$(BIN)/python bench/decode.py smollm2-135m smollm2-135m:int4

check-models: $(VENV)/.test
	$(BIN)/python bench/check_models.py $(MODELS)

wheel: $(VENV)/.test
	$(BIN)/python -m build

# pyproject.toml maps export/ and runtimes/ into the package. mypy cannot see that, so it gets these links.
types:
	@mkdir -p .types/edgespec
	@ln -sfn ../../export .types/edgespec/export
	@ln -sfn ../../runtimes .types/edgespec/runtimes

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.cpu: $(VENV)/bin/python pyproject.toml
	@echo "installing into $(VENV), which takes a minute or two"
	@$(BIN)/python scripts/pip_install.py -e ".[cpu]"
	@touch $@

$(VENV)/.test: $(VENV)/bin/python pyproject.toml
	$(BIN)/python $(INSTALL) -e ".[test]"
	@touch $@

# pip has no way to ask for the oldest.
$(VENV)-oldest/.test: pyproject.toml
	$(PYTHON) -m venv $(VENV)-oldest
	$(VENV)-oldest/bin/python $(INSTALL) uv
	$(VENV)-oldest/bin/uv pip install --quiet --python $(VENV)-oldest/bin/python --resolution lowest-direct -e ".[test]"
	@touch $@

$(VENV)-transformers/.test $(VENV)-optimum/.test: $(VENV)-%/.test: pyproject.toml
	$(PYTHON) -m venv $(VENV)-$*
	$(VENV)-$*/bin/python $(INSTALL) -e ".[$*,test]"
	@touch $@

# torch in the release that these extras have too: the newest one may bring gigabytes for GPUs.
$(VENV)-train/.test: pyproject.toml
	$(PYTHON) -m venv $(VENV)-train
	$(VENV)-train/bin/python $(INSTALL) -e ".[train,test]" torch==2.13.0
	@touch $@

# Without xllamacpp, which has llama.cpp, its side is skipped in words.
$(VENV)-differential/.test: pyproject.toml
	$(PYTHON) -m venv $(VENV)-differential
	$(VENV)-differential/bin/python $(INSTALL) -e ".[test]" \
		torch==2.13.0 transformers
	-$(VENV)-differential/bin/python $(INSTALL) xllamacpp
	@touch $@

# speculators without its needs for training, which are gigabytes.
$(VENV)-heads/.test: pyproject.toml
	$(PYTHON) -m venv $(VENV)-heads
	$(VENV)-heads/bin/python $(INSTALL) -e ".[test]" \
		torch==2.13.0 transformers==5.15.0 loguru pydantic-settings openai datasets
	$(VENV)-heads/bin/python $(INSTALL) --no-deps \
		speculators==0.9.0 hs-connectors==0.9.0 dflash==0.1.0
	-$(if $(DEEPSPEC),,git clone --quiet --depth 1 https://github.com/deepseek-ai/DeepSpec $(VENV)-heads/DeepSpec)
	@touch $@

$(VENV)-serve/.test: pyproject.toml
	$(PYTHON) -m venv $(VENV)-serve
	$(VENV)-serve/bin/python $(INSTALL) -e ".[test]" \
		openai ollama langchain-ollama litellm langchain-openai llama-index-llms-openai-like
	@touch $@

$(VENV)-suites/.test: pyproject.toml
	$(PYTHON) -m venv $(VENV)-suites
	$(VENV)-suites/bin/python $(INSTALL) -e ".[test]" \
		openai pytest-asyncio respx rich requests aiohttp
	@touch $@

# Of the extra test what tests of devices import.
$(VENV)-npu/.test: pyproject.toml
	$(PYTHON) -m venv $(VENV)-npu
	$(VENV)-npu/bin/python $(INSTALL) -e ".[qnn,openvino]" pytest pytest-xdist hypothesis gguf safetensors
	@touch $@

clean:
	rm -rf $(VENV) $(VENV)-oldest $(VENV)-transformers $(VENV)-optimum $(VENV)-train $(VENV)-npu $(VENV)-serve $(VENV)-suites $(VENV)-differential $(VENV)-heads .types build dist *.egg-info
