# Every command a newcomer needs. `make` alone lists them.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
BIN := .venv/bin
# What the job, or pytest, gets on its command line: make run ARGS="trainer.total_training_steps=5"
ARGS ?=
# Test files run in so many processes, each file in one of them: long ones first (tests/conftest.py), then by name.
WORKERS ?= 3
PYTEST = $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder
# Images for containers set it. Then each of a job's dozen processes would compile this project for itself.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help install run models soak sglang vision environments tinker trackers mutants check test test-all lint style types imports docs wheels format lock clean distclean

help: ## list these commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

install: ## make .venv with the pinned CPU stack; does nothing when nothing has changed
	@scripts/install_cpu.sh

run: install ## train: python -m verl.trainer.main_ppo; overrides in ARGS="key=value ..."
	@$(BIN)/python -m verl.trainer.main_ppo $(ARGS)

test: install sglang vision ## the quick tests, and each capability once with its real parts
	@$(PYTEST) --cells all -m "not job or once" $(ARGS)

test-all: install sglang vision environments tinker trackers ## every test; of long matrices and jobs the day's part (ARGS="--cells all": all); options for pytest in ARGS="..."
	@$(PYTEST) --cells today $(ARGS)

soak: install ## five minutes of random faults over a real run: what it survives, and how soon; ARGS="--minutes 60 --seed 7 --mode hybrid"
	@$(BIN)/python -m benchmarks.soak $(ARGS)

models: install vision ## try every architecture of docs/models.md in trainers and vLLM, which takes long; writes the page; ARGS="--only llama,gpt2"
	@$(BIN)/python scripts/models_page.py --run $(ARGS)

# Beside the environment: as a dependency it would replace packages that vLLM needs.
sglang: install ## SGLang's Python part into .venv/sglang, for tests of it on CPU; without, they are skipped
	@test requirements/sglang-cpu.txt -ot .venv/sglang/installed || { \
	    rm -rf .venv/sglang && \
	    $(BIN)/python -m pip --quiet --disable-pip-version-check install --no-deps --no-compile --target .venv/sglang \
	        --requirement requirements/sglang-cpu.txt && touch .venv/sglang/installed; } || \
	    echo "SGLang cannot be installed; what it said is above. Its tests are skipped."

# Beside the environment, too: transformers would find it there.
vision: install ## torchvision's Python part into .venv/vision, for tests of vLLM with pictures on CPU; without, they are skipped
	@test requirements/vision.txt -ot .venv/vision/installed || { \
	    rm -rf .venv/vision && \
	    $(BIN)/python -m pip --quiet --disable-pip-version-check install --no-deps --no-compile --target .venv/vision \
	        --requirement requirements/vision.txt && \
	    cat tests/torchvision_operators.py >>.venv/vision/torchvision/extension.py && touch .venv/vision/installed; } || \
	    echo "torchvision cannot be installed; what it said is above. Tests of vLLM with pictures are skipped."

# An interpreter of its own, which sees the environment's packages and has what they lack.
environments: install ## verifiers, OpenEnv and NeMo-Gym, each in a directory below .venv, for tests of environments; without, they are skipped
	@test requirements/openenv.txt -ot .venv/openenv/installed || { \
	    rm -rf .venv/openenv && \
	    $(BIN)/python -m pip --quiet --disable-pip-version-check install --no-deps --target .venv/openenv \
	        --requirement requirements/openenv.txt && touch .venv/openenv/installed; } || \
	    echo "OpenEnv cannot be installed; what it said is above. Its tests are skipped."
# NeMo-Gym asks for Python 3.12; what is needed of it runs with 3.11.
	@test requirements/nemo-gym.txt -ot .venv/nemo-gym/installed || { \
	    rm -rf .venv/nemo-gym && \
	    $(BIN)/python -m pip --quiet --disable-pip-version-check install --no-deps --no-compile \
	        --ignore-requires-python --target .venv/nemo-gym --requirement requirements/nemo-gym.txt && \
	    touch .venv/nemo-gym/installed; } || \
	    echo "NeMo-Gym cannot be installed; what it said is above. Its tests are skipped."
	@test requirements/verifiers.txt -ot .venv/verifiers/installed || { \
	    rm -rf .venv/verifiers && $(BIN)/python -m venv --without-pip .venv/verifiers && \
	    purelib='import sysconfig; print(sysconfig.get_path("purelib"))' && \
	    site=$$(.venv/verifiers/bin/python -c "$$purelib") && $(BIN)/python -c "$$purelib" >"$$site/beside.pth" && \
	    $(BIN)/python -m pip --quiet --disable-pip-version-check install --no-deps --target "$$site" \
	        --requirement requirements/verifiers.txt && touch .venv/verifiers/installed; } || \
	    echo "verifiers cannot be installed; what it said is above. Its tests are skipped."

tinker: install ## Tinker's client and cookbook into .venv/tinker, for tests of `verl-sync serve`; without, they are skipped
	@test requirements/tinker.txt -ot .venv/tinker/installed || { \
	    rm -rf .venv/tinker && \
	    $(BIN)/python -m pip --quiet --disable-pip-version-check install --no-deps --target .venv/tinker \
	        --requirement requirements/tinker.txt && touch .venv/tinker/installed; } || \
	    echo "tinker cannot be installed; what it said is above. Its tests are skipped."

trackers: install ## services of trainer.logger into .venv/trackers, for tests of them; without, they are skipped
	@test requirements/trackers.txt -ot .venv/trackers/installed || { \
	    rm -rf .venv/trackers && \
	    $(BIN)/python -m pip --quiet --disable-pip-version-check install --no-deps --target .venv/trackers \
	        --requirement requirements/trackers.txt && touch .venv/trackers/installed; } || \
	    echo "trackers cannot be installed; what it said is above. Their tests are skipped."

# Beside the environment as well, and without what Cosmic Ray itself needs for running tests.
mutants: install ## which tests find which faults of a package, in 10 minutes: PACKAGE=verl/checkpoint_engine/plan; ARGS="--sample 50 --seed 1"
	@test requirements/mutants.txt -ot .venv/mutants/installed || { \
	    rm -rf .venv/mutants && \
	    $(BIN)/python -m pip --quiet --disable-pip-version-check install --no-deps --target .venv/mutants \
	        --requirement requirements/mutants.txt && touch .venv/mutants/installed; }
	@$(BIN)/python scripts/mutants.py $(PACKAGE) $(ARGS)

check: style types imports ## what needs no engine, no Ray and no several processes: style, types, contracts, quick tests; 4 to 8 minutes
	@$(PYTEST) -m "not job" $(ARGS)

lint: style types imports ## everything below that only reads the code

style: install ## ruff: rules and formatting; and the prose of the documents
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/python scripts/prose.py

# 2: it failed itself, for instance because its workers did not start in time on a machine that is busy.
types: install ## mypy
	$(BIN)/mypy --num-workers auto || { (($$? == 2)) && $(BIN)/mypy; }
	@mkdir -p build/types/verl_sync # as setup.py lays it out, away from this verl: it is PyPI's that it meets
	@ln -sfn $(CURDIR)/verl/checkpoint_engine/* $(CURDIR)/distributions/verl_sync/for_verl build/types/verl_sync/
	cd build/types && env -u PYTHONPATH MYPYPATH=. $(abspath $(BIN))/mypy --config-file $(CURDIR)/pyproject.toml --package verl_sync.for_verl

imports: install ## import-linter: which package may import which
	$(BIN)/lint-imports

docs: ## build the site into build/site; a broken link or page is an error
	@test requirements/docs.txt -ot .venv-docs/installed || { \
	    $(or $(PYTHON),$(shell command -v python3.11 python3 | head -n 1)) -m venv --clear .venv-docs && \
	    .venv-docs/bin/pip install --quiet --requirement requirements/docs.txt && touch .venv-docs/installed; }
	@NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict --site-dir build/site

wheels: install ## build both distributions into dist: verl-sync, and its weight sync alone, imported as verl_sync
	@scripts/build_wheels.sh

format: install ## let ruff fix and format
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

lock: ## resolve requirements/cpu.in into cpu.lock; UPGRADE=1 moves every package to its newest version
	@$(or $(PYTHON),python3.11) scripts/lock_cpu.py $(if $(UPGRADE),--upgrade)

clean: ## remove caches and build products; keeps .venv, outputs and checkpoints
	rm -rf build dist *.egg-info distributions/*/build distributions/*/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find verl tests benchmarks examples recipe scripts -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## the same, and .venv
	rm -rf .venv .venv-docs
