#!/usr/bin/env bash
# Run the tests: ./run_tests.sh [arguments of pytest]. The first call installs their requirements into .venv.
#
# ./run_tests.sh                  the default tier: every law once, with three workers per core
# ./run_tests.sh --all            all cases: the same laws with more sizes, meshes and seeds
# ./run_tests.sh --share 2/5      the second fifth of the cases outside the default tier
# ./run_tests.sh --laws           print every law and where it runs, without running tests
# ./run_tests.sh -n 0 --pdb tests/test_cli.py -k help    arguments of pytest; here, one test at a time
#
# SHARDTRAIN_VENV  folder of the environment (.venv)     PYTHON  interpreter that creates it (3.11 or newer)
# SHARDTRAIN_TEST_PATIENCE  factor of all timeouts (1); they also grow with the load of the machine
set -euo pipefail

here="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"
extras="dev"
source "$here/.ci/environment.sh"

cd "$here"
cores="$(env -u OMP_NUM_THREADS nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)" # nproc obeys OMP_NUM_THREADS
# tests start processes; more threads than cores would slow them down
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# without bytecode caches, each test and process would compile every module again, which takes about a second
unset PYTHONDONTWRITEBYTECODE
workers=$((3 * cores)) # a third of the time is spent waiting, for example for Slurm, ssh and timeouts
((workers <= 16)) || workers=16 # each worker loads PyTorch and starts ranks
# worksteal: one worker creates the fixtures of a file, and idle workers take over the last tests
exec "$python" -m pytest -n "$workers" --dist worksteal "$@"
