#!/usr/bin/env bash
# All measurements of a GPU in the order of their value, within about 15 minutes on one H200.
#
#     benchmarks/gpu_session.sh                     on a GPU; rows go to benchmarks/results/accelerator-cuda.jsonl
#     benchmarks/gpu_session.sh --tiny FOLDER       the same parts with tiny models on a CPU; rows go to FOLDER
#
# Each part appends its rows as soon as it has them, so it can be stopped at any time. A part that fails leaves a row
# with the reason, and the next part runs. Exits with a non-zero status if a part failed.
set -uo pipefail

here="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$here"
python="${PYTHON:-.venv/bin/python}"
more=()
if [[ "${1:-}" == --tiny ]]; then
    more=(--device cpu --tiny --results "${2:?--tiny FOLDER}")
elif (($#)); then
    echo "usage: benchmarks/gpu_session.sh [--tiny FOLDER]" >&2
    exit 2
fi
failed=()

part() { # NAME [OPTION...]: run a part of accelerator.py
    local name="$1" start=$SECONDS
    shift
    "$python" benchmarks/accelerator.py --only "$name" "${more[@]}" "$@" || failed+=("$name")
    printf '===== %s: %d s\n' "$name" $((SECONDS - start))
}

part capabilities
# numbers equal to a CPU: the newest options first, then the head with its loss
part options --cases "averages of weights,embedding noise,label smoothing,z-loss,loss per source,LoRA,accumulation"
part losses
# tokens per second beside the goals of docs/performance.md
part speed --cases "8B of five rows,8B of five rows float8,8B of two rows of 8192,8B of two rows of 8192 float8"
part experts --cases "4 layers of 30B-A3B"
part checkpoint
part memory
part routes
part generation
# tests that need a device
if [[ ${#more[@]} -eq 0 ]]; then
    "$python" -m pytest -q tests/ops/test_document_mask.py tests/ops/test_sliding_window.py \
        tests/metrics/test_peak_memory.py || failed+=(tests)
fi
# with the time that is left
part numbers
part waits
part options

if ((${#failed[@]})); then
    echo "failed: ${failed[*]}"
    exit 1
fi
