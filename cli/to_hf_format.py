"""FMEngine's program of this name, with its flags: a folder of FMEngine, or a run of ours, as a Hugging Face folder.

python cli/to_hf_format.py --in-model-path DIR --out-model-path HF_DIR --base-model HF_DIR --step latest
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # it works before `pip install`, too

from shardtrain.compat.fmengine.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["to_hf_format", *sys.argv[1:]]))
