#!/usr/bin/env bash
# Former name of run_train.sh.
exec "$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)/run_train.sh" "$@"
