# make demo, make test: everything a fresh machine needs, then the thing itself. Quick the second time.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
TORCH := torch==2.13.0# one exact version: a looser one may bring gigabytes of CUDA packages

# Compiled once, whatever the surroundings say: tests start some 150 processes.
unexport PYTHONDONTWRITEBYTECODE

# A worker for each core takes whole files, those with slow tests first. Nice: what trains beside a server has the
# least rank there is, 19, and must get a share of the cores.
PYTEST = nice -n 15 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

.PHONY: setup demo quick test check suite quick-suite wheels bench bench-peers vllm picture screenshots advisepicture drafter clean

setup: $(STAMP)

$(STAMP): pyproject.toml Makefile
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[dev]" "$(TORCH)"
	touch $(STAMP)

demo: setup
	$(BIN)/paceline pull smollm2-135m
	$(BIN)/python examples/agent.py

# At every commit, within a minute: style, types, and the tests that need no weights.
quick: setup
	@$(MAKE) --no-print-directory -j2 check quick-suite

test: setup
	$(BIN)/paceline pull smollm2-135m
	@$(MAKE) --no-print-directory -j2 check suite

suite: setup
	$(PYTEST)

quick-suite: setup
	$(PYTEST) --hypothesis-profile=quick -m "not (model or large or gemma or gpu or vllm or browser or slow)"

check: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

# dist/: the source distribution, and wheels with prebuilt kernels for Linux on x86-64 and, cross-compiled, on ARM
# (Debian: g++-aarch64-linux-gnu). auditwheel tags them with the oldest glibc whose symbols are enough.
wheels: setup
	rm -rf dist
	$(BIN)/python -m build --outdir dist/plain
	CXX=aarch64-linux-gnu-g++ $(BIN)/python -m build --wheel --outdir dist/plain
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/auditwheel repair --wheel-dir dist dist/plain/*.whl
	mv dist/plain/*.tar.gz dist
	rm -r dist/plain

# Within half an hour on two cores: 7 minutes for the small model, 21 for the larger one. What bench-peers did
# not install is left out, and said so. make bench BENCH=--write keeps the results and renews the tables.
bench: setup
	$(BIN)/paceline pull smollm2-135m
	$(BIN)/paceline pull qwen2.5-coder-1.5b
	$(BIN)/python -m bench $(BENCH)

# The picture in the README, on a quiet machine.
ORDER := Order B-2047: Ada Lovelace ordered 12 brass lanterns (LN-4471) and 2 copper kettles (KT-0093), to be shipped
picture: setup
	$(BIN)/paceline pull qwen2.5-coder-1.5b
	$(BIN)/paceline generate --model qwen2.5-coder-1.5b --chat --schema examples/order.json --seed 7 --show --compare \
	  --prompt "$(ORDER) to 12 St James Square, London. As JSON, please." --svg docs/images/generate.svg

# The pictures of the page, on a quiet machine with Chromium.
screenshots: setup
	$(BIN)/paceline pull smollm2-135m
	$(BIN)/python docs/make_screenshots.py

# The picture in docs/advise.md, from the traces in DATA, on a quiet machine with Chromium.
TRACES = apibank bfcl_single_turn mint_code_actions tau_bench_airline_gpt4o
advisepicture: setup
	$(BIN)/paceline pull smollm2-135m
	$(BIN)/paceline advise --target smollm2-135m $(foreach name,$(TRACES),--traces $(DATA)/traces/$(name).jsonl.gz) \
	  --requests 16 --max-tokens 96 --concurrency 4 --html report.html
	chromium --headless --no-sandbox --hide-scrollbars --window-size=1280,1080 --screenshot=docs/images/advise.png \
	  "file://$(CURDIR)/report.html"

bench-peers: setup
	$(BIN)/paceline pull smollm2-135m
	$(BIN)/paceline pull qwen2.5-coder-1.5b
	$(BIN)/python -m bench.peers.install

# vLLM for CPUs in .peers/vllm, an environment of its own (3.5 GB), then the tests that need it.
vllm: setup
	$(BIN)/paceline pull smollm2-135m
	$(BIN)/python -m bench.peers.install vllm
	test -e .peers/vllm/ready
	nice -n 15 $(BIN)/python -m pytest -m vllm

# The drafter in src/paceline/heads/shipped, anew, on a GPU: some 40 minutes, calls first, then chats as well.
# DATA: where its prompts are recorded, a folder with traces/ and specbench/. It goes to drafters/$(MODEL)-block
# in PACELINE_HOME, and serves in place of the shipped one from then on (--replace). MODEL=qwen2.5-coder-1.5b: one for that.
DATA ?= data
MODEL ?= smollm2-135m
TRAIN = $(BIN)/paceline train --traces prompts.jsonl.gz --target $(MODEL) --kind block --max-prompt 3072
drafter: setup
	$(BIN)/paceline pull $(MODEL)
	$(BIN)/python -m bench.train_prompts $(DATA) -o prompts.jsonl.gz
	$(TRAIN) --out $(MODEL)-calls --minutes 12.4 --max-new 384 --synthetic 3 --per-prompt 3
	$(TRAIN) --out $(MODEL)-block --minutes 14.4 --max-new 320 --synthetic-chats 40 --per-prompt 2 --start $(MODEL)-calls --replace

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
