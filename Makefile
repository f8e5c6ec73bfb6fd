# The commands of the README. `make` alone lists them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ONLY ?=
FIX ?=
export SEED DATABASE ROUNDS SCALE FAULTS

.PHONY: help setup run test test-story test-endurance test-callbacks test-rest chaos bench verify doctor lint lock clean

help:
	@echo "make run      set up and start everything (ONLY=\"web courier ...\" for some lines)"
	@echo "make test     set up and run every test"
	@echo "make chaos    a storm of faults on real processes (SEED=, DATABASE=, ROUNDS=, SCALE=, FAULTS=)"
	@echo "make bench    side by side with what people would use instead, into docs/performance.md (ONLY=\"submit poll ...\")"
	@echo "make doctor   whether everything holds that must always hold (FIX=1 repairs what is safe)"
	@echo "make verify   the whole story with real processes, recorded in docs/verification.md"
	@echo "make setup    set up only: $(VENV) from the lock file, the tables"
	@echo "make lint     flake8, mypy"
	@echo "make lock     refresh the lock files from setup.cfg"
	@echo "make clean    remove $(VENV); var/, where the data is, stays"

$(VENV)/.runs: requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit("uketsuke needs Python >= 3.11; this is " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	@echo "Setting up $(VENV) ..."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --requirement requirements.lock
	@touch $@

$(VENV)/.tests: requirements-dev.lock $(VENV)/.runs
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --requirement requirements-dev.lock
	@touch $@

$(VENV)/.bench: requirements-bench.lock $(VENV)/.tests
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --requirement requirements-bench.lock
	@touch $@

setup: $(VENV)/.runs
	@$(BIN)/python -m app.stack --migrate

run: $(VENV)/.runs
	@exec $(BIN)/python -m app.stack $(ONLY)

test: $(VENV)/.tests lint
	@exec $(MAKE) --no-print-directory --jobs 4 --keep-going test-story test-endurance test-callbacks test-rest

STORY = $(patsubst %,tests/test_%.py,acceptance readme crashes doctor)

ENDURANCE = $(patsubst %,tests/test_%.py,endurance storm schemathesis enforcing)

CALLBACKS = $(patsubst %,tests/test_%.py,attempt_log callbacks_paper delivering egress_addresses egress_bounds egress_names \
  hooksink hooksink_journal hooksink_page hooksink_signature isolation never_before redelivering redelivering_many schedule \
  signing spreading waiting)

# Four parts that take about as long, each with servers of its own: much of the first three is waiting.
test-story:
	@exec $(BIN)/python -m pytest $(STORY)

test-endurance:
	@exec $(BIN)/python -m pytest $(ENDURANCE)

test-callbacks:
	@exec $(BIN)/python -m pytest $(CALLBACKS)

test-rest:
	@exec $(BIN)/python -m pytest $(foreach part,$(STORY) $(ENDURANCE) $(CALLBACKS),--ignore=$(part))

chaos: $(VENV)/.tests
	@exec $(BIN)/python -m tests.storm

bench: $(VENV)/.bench
	@exec $(BIN)/python -m bench $(ONLY)

doctor: $(VENV)/.runs
	@exec $(BIN)/python -m app.doctor $(if $(FIX),--fix)

verify: $(VENV)/.tests
	@exec $(BIN)/python -m tests.verify

lint: $(VENV)/.tests
	@$(BIN)/flake8 app tasks hooksink tests bench examples celeryconfig.py
	@$(BIN)/mypy --no-error-summary app tasks hooksink

REQUIRES = $(BIN)/python -c 'import configparser as c; s = c.ConfigParser(); s.read("setup.cfg"); print(s["options"]["install_requires"], $(1))'
COMPILE = $(BIN)/pip-compile --quiet --upgrade --strip-extras --no-header --no-annotate --no-emit-index-url --no-emit-find-links

lock: $(VENV)/.tests
	@$(call REQUIRES,"") | $(COMPILE) --output-file requirements.lock -
	@$(call REQUIRES,s["options.extras_require"]["dev"]) | $(COMPILE) --constraint requirements.lock --output-file requirements-dev.lock -
	@$(call REQUIRES,s["options.extras_require"]["bench"]) | $(COMPILE) --constraint requirements.lock --constraint requirements-dev.lock --output-file requirements-bench.lock -

clean:
	rm -rf $(VENV)
