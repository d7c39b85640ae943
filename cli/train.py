"""FMEngine's program of this name, with its flags; torchrun, DeepSpeed's launcher or nothing may have started it.

torchrun --nproc-per-node 2 cli/train.py --init_ckpt DIR --data_path DATA.jsonl --deepspeed_config llama.json
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # it works before `pip install`, too

from shardtrain.compat.fmengine.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
