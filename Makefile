# Names for what the scripts do, for those who look for a Makefile first.
.PHONY: setup check test test-all docs site drawings notebook cast pictures bench audit sbom

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

docs: drawings  ## pages and drawings that are generated, and the laws about all pages
	.venv/bin/python docs/map.py
	.venv/bin/python -m shardtrain.config.options_page
	./run_tests.sh tests/test_docs.py

site: setup  ## the documentation as a site: build/site/index.html
	.venv/bin/sphinx-build -W -q -c docs -b html . build/site

cast: setup  ## the picture of the README: a first run in a terminal, recorded and drawn; minutes
	.venv/bin/python docs/cast.py -o docs/first_run.svg --keep "0:1 10:12 16:18 25:33 -36:" --title "shardtrain train debug" -- \
		.venv/bin/shardtrain train debug --job.dump_folder build/first_run

drawings: setup  ## the drawings of the concepts, and the plots of benchmarks/results
	.venv/bin/python docs/drawings.py
	.venv/bin/python docs/plots.py

notebook: setup  ## examples/notebook.ipynb, run and kept with what it prints
	.venv/bin/python docs/notebook.py

pictures: cast  ## and the report of that run in a browser, for docs/report.md
	.venv/bin/python docs/pictures.py build/first_run docs

bench: setup  ## what the training loop costs beside a bare one
	.venv/bin/python benchmarks/loop_overhead.py

audit:     ## known vulnerabilities of the versions that are tested together (asks PyPI; pip install pip-audit first)
	python3 -m pip_audit --strict --no-deps --disable-pip --requirement constraints/tested.txt

sbom: setup  ## what is in .venv, with versions, licences and needs, as JSON: build/sbom.json
	mkdir -p build
	.venv/bin/python -m pip inspect --local > build/sbom.json
