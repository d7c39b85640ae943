"""``torchrun ... train.py --job.config_file FILE``, as users of torchtrain and of torchtitan start a training.

The same as ``python -m shardtrain.train``, from a clone of this repository.
"""

import runpy

if __name__ == "__main__":
    runpy.run_module("shardtrain.train", run_name="__main__", alter_sys=True)
