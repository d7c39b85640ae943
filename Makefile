# Names for what the scripts do, for those who look for a Makefile first.
.PHONY: setup check test test-all docs site bench

setup:     ## an environment in .venv with all that tests need
	./run_tests.sh --version

check: setup  ## format, lint, types, import directions: seconds
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/python -m mypy
	.venv/bin/lint-imports

test:      ## the default tier: every law once
	./run_tests.sh

test-all:  ## all cases: an hour and more
	./run_tests.sh --all

docs: setup  ## pages that are generated, and the laws about all pages
	.venv/bin/python docs/map.py
	.venv/bin/python -m shardtrain.config.options_page
	./run_tests.sh tests/test_docs.py

site: setup  ## the documentation as a site: build/site/index.html
	.venv/bin/sphinx-build -W -q -c docs -b html . build/site

bench: setup  ## what the training loop costs beside a bare one
	.venv/bin/python benchmarks/loop_overhead.py
