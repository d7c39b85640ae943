#!/usr/bin/env bash
# verl_environment.sh FOLDER: create a virtual environment with verl on a CPU, for tests/compat/test_verl.py.
# verl requires an older transformers and Python than the tests of this package. Of its requirements, only those that
# its engines and its SFT trainer import are installed. Set PYTHON to the interpreter, 3.11 or 3.12.
set -euo pipefail

folder="${1:?usage: verl_environment.sh FOLDER}"
here="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
python="$folder/bin/python"
torch="$(sed -n '/^torch==/p' "$here/scripts/constraints/cpu.txt")"
export PIP_DISABLE_PIP_VERSION_CHECK=1

[[ -x "$python" ]] || "${PYTHON:-python3.11}" -m venv "$folder"
"$python" -m pip install --quiet "$torch" ||
    "$python" -m pip install --quiet --index-url https://download.pytorch.org/whl/cpu "$torch"
"$python" -m pip install --quiet --no-deps "verl==0.9.1"
"$python" -m pip install --quiet "transformers>=5.5.3,!=5.6.0,<5.11" "tensordict>=0.8,<=0.10,!=0.9.0" "numpy>=2" ray \
    accelerate cachetools codetiming datasets dill fastapi hydra-core jinja2 pandas peft pillow psutil pyarrow pytest \
    tensorboard torchdata uvicorn
"$python" -m pip install --quiet --editable "$here"
