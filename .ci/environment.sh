# Sourced by run_train.sh and run_tests.sh: set $python to an interpreter with the package. Create the environment if
# needed. Expects $here (the repository) and $extras ("" or "dev"). With -P, Python imports nothing from the current folder.

fail() {
    echo "error[2]: $1" >&2
    exit 2
}

has_package() { # INTERPRETER MODULE: succeed if the package and this requirement are installed
    (cd / && "$1" -c "import importlib.util as u, sys; sys.exit(not all(map(u.find_spec, ['shardtrain', '$2'])))") \
        2>/dev/null
}

find_python() {
    local name
    for name in ${PYTHON:-python3 python3.13 python3.12 python3.11 python}; do
        if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$name"
            return
        fi
    done
    fail "no Python 3.11 or newer was found; install one, or set PYTHON to its path"
}

inputs_of() { # EXTRAS: print the inputs of an environment; a change means that it must be created again
    echo "$1" "$here" "$constraints"
    cat "$here/pyproject.toml" "$here"/scripts/constraints/*.txt
}

is_current() { # succeed if the environment is up to date; the one for tests is sufficient for training
    local kind
    [[ -x "$python" ]] || return 1
    for kind in "$extras" dev; do
        inputs_of "$kind" | cmp -s - "$venv/.shardtrain-${kind:-train}" && return
    done
    return 1
}

# with_progress PHASE COMMAND...: run the command, and every 5 s print the phase, the seconds and the size of the
# environment, because pip is silent while it unpacks
with_progress() {
    local phase="$1" started=$SECONDS status=0 beat
    shift
    (
        sleeping=
        # also end the sleep, which would keep this script's pipes open for up to five seconds
        trap 'kill $sleeping 2>/dev/null; exit' TERM
        while sleep 5 & sleeping=$!; wait $sleeping; kill -0 $$ 2>/dev/null; do # background jobs ignore Ctrl-C
            echo "  $phase: $((SECONDS - started)) s, $(du -sm "$venv" 2>/dev/null | cut -f1) MB in $venv" >&2
        done
    ) &
    beat=$!
    "$@" || status=$?
    kill "$beat" 2>/dev/null
    wait "$beat" 2>/dev/null || true
    return "$status"
}

run_pip() { # PHASE ARGUMENTS...: run pip install
    local phase="$1"
    shift
    with_progress "$phase" "$python" -P -m pip install --quiet "$@"
}

install() {
    local torch target="$here"
    [[ -n "$extras" ]] && target="$here[$extras]"
    torch="$(sed -n '/^torch==/p' "$constraints")"
    echo "installing shardtrain and $torch into $venv (once; about 1,000 MB, a minute or a few)" >&2
    if [[ "$constraints" == */default.txt ]]; then
        run_pip "$torch" "$torch" || fail "pip could not install $torch; its message is above"
    elif ! run_pip "$torch" "$torch" 2> >(grep --line-buffered "^  $torch: [0-9]* s, " >&2); then
        echo "$torch is not on the configured index; taking it from PyTorch's own" >&2
        run_pip "$torch" --index-url https://download.pytorch.org/whl/cpu "$torch" ||
            fail "pip could not install $torch; its message is above"
    fi
    run_pip "shardtrain and its other requirements" --constraint "$constraints" --editable "$target" ||
        fail "pip could not install the package; its message is above"
    echo "installed" >&2
}

# Without an NVIDIA device, install PyTorch without CUDA. On macOS there is only one kind of wheel.
constraints="$here/scripts/constraints/cpu.txt"
if [[ "$(uname -s)" != Linux ]] || compgen -G '/dev/nvidia[0-9]*' >/dev/null || nvidia-smi -L >/dev/null 2>&1; then
    constraints="$here/scripts/constraints/default.txt"
fi

export PIP_DISABLE_PIP_VERSION_CHECK=1
need=torch
[[ "$extras" == dev ]] && need=pytest
active="${VIRTUAL_ENV:-${CONDA_PREFIX:-}}"
if [[ -z "${SHARDTRAIN_VENV:-}" && -n "$active" && -x "$active/bin/python" ]] && has_package "$active/bin/python" $need
then
    python="$active/bin/python"
else
    venv="${SHARDTRAIN_VENV:-$here/.venv}"
    python="$venv/bin/python"
    if ! is_current; then
        if [[ ! -x "$python" ]]; then
            base="$(find_python)"
            with_progress "creating the environment" "$base" -P -m venv "$venv" || fail "$base cannot make $venv; on Debian and Ubuntu install python3-venv"
        fi
        "$python" -P -m pip --version >/dev/null 2>&1 || fail "$venv has no pip; remove it and install python3-venv"
        install
        inputs_of "$extras" >"$venv/.shardtrain-${extras:-train}"
    fi
fi
