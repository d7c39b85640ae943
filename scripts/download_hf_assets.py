"""``shardtrain data download`` under its torchtitan name, with the same options.

python scripts/download_hf_assets.py --repo_id meta-llama/Llama-3.1-8B --assets tokenizer
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works without `pip install`, too

from shardtrain.cli import main

if __name__ == "__main__":
    sys.exit(main(["data", "download", *sys.argv[1:]]))
