"""``torchrun -m shardtrain.train``, as users of torchtitan start it: the verb ``train``."""

import runpy
import sys

if __name__ == "__main__":
    sys.argv.insert(1, "train")
    runpy.run_module("shardtrain", run_name="__main__", alter_sys=True)
