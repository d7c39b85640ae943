"""Run the command ``train``. Users of torchtitan start it like this: ``torchrun -m shardtrain.train``."""

import runpy
import sys

if __name__ == "__main__":
    sys.argv.insert(1, "train")
    runpy.run_module("shardtrain", run_name="__main__", alter_sys=True)
