#!/usr/bin/env bash
# Run the tests: ./run_tests.sh [arguments of pytest]. On the first call it installs what they need into .venv.
#
# SHARDTRAIN_VENV  folder of the environment (.venv)     PYTHON  interpreter that makes it (3.11 or newer)
set -euo pipefail

here="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"
extras="dev"
source "$here/.ci/environment.sh"

cd "$here"
# tests start processes of their own; more threads than cores would make each of them slower
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec "$python" -m pytest "$@"
