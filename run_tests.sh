#!/usr/bin/env bash
# Run the tests: ./run_tests.sh [arguments of pytest]. On the first call it installs what they need into .venv.
#
# ./run_tests.sh                  the default tier: every law once, three tests at a time for every core
# ./run_tests.sh --all            everything: the same laws at more sizes, meshes and seeds
# ./run_tests.sh --share 2/5      of what the default tier leaves out, the second fifth
# ./run_tests.sh --laws           print every law and where it runs; run nothing
# ./run_tests.sh -n 0 --pdb tests/test_cli.py -k help    pytest's own arguments, here one test at a time
#
# SHARDTRAIN_VENV  folder of the environment (.venv)     PYTHON  interpreter that makes it (3.11 or newer)
# SHARDTRAIN_TEST_PATIENCE  what limits of time are multiplied by (1); they grow with the machine's load by themselves
set -euo pipefail

here="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"
extras="dev"
source "$here/.ci/environment.sh"

cd "$here"
cores="$(env -u OMP_NUM_THREADS nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)" # nproc counts no more than that says
# tests start processes of their own; more threads than cores would make each of them slower
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# a test, and each process that it starts, would compile every module again: a second, and ten for all tests
unset PYTHONDONTWRITEBYTECODE
workers=$((3 * cores)) # a third of the tests' time goes to waiting: for Slurm, ssh, limits that pass
((workers <= 16)) || workers=16 # each holds PyTorch and starts ranks of its own
# worksteal: what tests of a file share is made by one worker, and the last tests are dealt again to one that is idle
exec "$python" -m pytest -n "$workers" --dist worksteal "$@"
