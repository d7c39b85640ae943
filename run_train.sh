#!/usr/bin/env bash
# Train on all devices of this machine. On the first call it makes .venv and installs the package into it.
#
#   ./run_train.sh [--section.key value ...]
#
# CONFIG_FILE  configuration (configs/debug.toml)        NGPU       number of ranks (all devices)
# LOG_RANK     ranks that write to the terminal (0)      COMM_MODE  same as --comm.mode
# RANK         with COMM_MODE=fake_backend, which trains nothing: the rank of NGPU that is built (0)
# SHARDTRAIN_VENV  folder of the environment (.venv)     PYTHON     interpreter that makes it (3.11 or newer)
set -euo pipefail

here="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"
extras=""
source "$here/.ci/environment.sh"

# torchtitan's default is a path below its own folder; so is ours, but a path of the caller's is relative to the caller
arguments=("${CONFIG_FILE:-$here/configs/debug.toml}")
for word in "$@"; do
    case "$word" in
        --job.config_file | --job.config_file=*) arguments=() ;;
    esac
done
if [[ -n "${NGPU:-}" ]]; then
    arguments+=(--nproc "$NGPU")
fi
if [[ -n "${COMM_MODE:-}" ]]; then
    arguments+=("--comm.mode=$COMM_MODE")
fi
if [[ -n "${TRAIN_FILE:-}" ]]; then
    echo "note: TRAIN_FILE=$TRAIN_FILE is ignored; the trainer is shardtrain.train" >&2
fi
# where the command is not on the caller's path yet, a run that succeeds ends with how it comes there
unset SHARDTRAIN_ACTIVATE
[[ -z "${venv:-}" ]] || export SHARDTRAIN_ACTIVATE="source $venv/bin/activate"
# the goodput of the run begins here, and not with an installation
SHARDTRAIN_HANDED_OVER="$(date +%s)"
export SHARDTRAIN_HANDED_OVER
# exec, so that a scheduler's signals reach the trainer and not this shell
exec "$python" -P -m shardtrain train ${arguments[@]+"${arguments[@]}"} "$@"
