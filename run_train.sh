#!/usr/bin/env bash
# Train on all devices of this machine. The first call creates .venv and installs the package into it.
#
#   ./run_train.sh [--section.key value ...]
#
# CONFIG_FILE  configuration (configs/debug.toml)        NGPU       number of ranks (all devices)
# LOG_RANK     ranks that write to the terminal (0)      COMM_MODE  same as --comm.mode
# RANK         with COMM_MODE=fake_backend, a dry run without training: the rank of NGPU to build (0)
# SHARDTRAIN_VENV  folder of the environment (.venv)     PYTHON     interpreter that creates it (3.11 or newer)
set -euo pipefail

here="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"
extras=""
source "$here/.ci/environment.sh"

# like in torchtitan, the default is in the repository; a path in CONFIG_FILE is relative to the current folder
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
# if the command is not on the PATH, a successful run ends with a hint how to activate the environment
unset SHARDTRAIN_ACTIVATE
[[ -z "${venv:-}" ]] || export SHARDTRAIN_ACTIVATE="source $venv/bin/activate"
# goodput is counted from here, without the installation
SHARDTRAIN_HANDED_OVER="$(date +%s)"
export SHARDTRAIN_HANDED_OVER
# exec: signals of a scheduler reach the trainer instead of this shell
exec "$python" -P -m shardtrain train ${arguments[@]+"${arguments[@]}"} "$@"
