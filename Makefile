.DEFAULT_GOAL := help
.PHONY: help check test t examples nightly hostile simulate simulated research picture notebooks architecture manifests reference site blocks

help: ## list the commands
	@grep -E '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## (.*)/\1\t\2/' | expand -t 14

check: ## format, lint and types
	ruff format --check .
	ruff check .
	pyright

test: ## the tests that every change must pass
	pytest -n auto -m 'not nightly' --sample

t: ## the tests of one package: make t P=federation
	pytest -n auto -m 'not nightly' --sample -q tests/$(P)

examples: ## the scripts of examples, and two rounds of each of the README's studies
	folder=$$(mktemp -d) && cd $$folder && for script in chat own_model own_method instruct qlora trainer chest entities series; do \
	  python $(CURDIR)/examples/$$script.py || exit 1; done && rm -r $$folder
	python examples/digits.py
	python examples/towers.py
	for study in digits safl prompts; do \
	  folder=$$(mktemp -d) && fedplan run examples/$$study.toml --set train.rounds=2 --output $$folder/run \
	  && fedplan verify $$folder/run && rm -r $$folder || exit 1; done

HOSTILE = test_inputs.py audits/test_tamper.py audits/test_damage.py federation/test_robust.py language/test_parser.py \
  privacy/test_hostile_server.py privacy/test_hostile_values.py runners/test_no_code.py runners/test_modes.py \
  runners/test_flower.py runners/test_starter.py secagg/test_attacks.py secagg/test_liars.py sites/test_attacks.py \
  sites/test_home.py sites/test_lies.py sites/test_people.py sites/test_statistics.py federation/test_trees.py
hostile: ## the tests of drawn lies, damage and inputs, which docs/explanation/threat-model.md names
	pytest -n auto -q $(addprefix tests/,$(HOSTILE))

SEED ?= 0
SEEDS ?= 1
simulate: ## federations under drawn faults: SEEDS of them from SEED on, in one process
	PYTHONPATH=.:tests/kit:tests/simulation python tests/simulation/simulate.py $(SEED) $(SEEDS) simulated.jsonl

simulated: ## count the faults, failpoints and error codes of simulated.jsonl, and what it missed
	PYTHONPATH=.:tests/kit:tests/simulation python tests/simulation/summary.py simulated.jsonl

nightly: ## all tests, the long ones too, and every law on more examples; a second call goes on
	python tests/night.py

research: ## the tests of research: needs the whole history of the repository
	pytest -n auto research/tests

picture: ## draw the pictures of the README and of the first page anew
	python docs/terminal.py
	python docs/picture.py

notebooks: ## run the notebooks and store their outputs
	python docs/notebooks.py

architecture: ## draw the map of the packages anew
	python docs/architecture.py

manifests: ## write the params of the short names anew
	python docs/manifests.py

reference: ## write the pages of the reference anew
	python docs/reference.py

site: ## build the documents as a site, into build/site
	mkdocs build --strict

blocks: ## count what of the documents is run, and their links
	python tests/kit/pages.py
