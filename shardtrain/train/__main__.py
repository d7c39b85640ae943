"""``torchrun -m shardtrain.train``: run the command ``train``, for users of torchtitan, who start it like
this."""

import runpy
import sys

if __name__ == "__main__":
    sys.argv.insert(1, "train")
    runpy.run_module("shardtrain", run_name="__main__", alter_sys=True)
