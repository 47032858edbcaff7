.DEFAULT_GOAL := help
.PHONY: help check test nightly picture manifests

help: ## list the commands
	@grep -E '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## (.*)/\1\t\2/' | expand -t 12

check: ## format, lint and types
	ruff format --check .
	ruff check .
	pyright

test: ## the tests that every change must pass
	pytest -n auto -m 'not nightly'

nightly: ## all tests, the long ones too
	pytest -n auto

picture: ## draw the README's picture anew
	python docs/picture.py

manifests: ## write the params of the short names anew
	python docs/manifests.py
