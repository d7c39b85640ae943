"""shardtrain: one trainer for large transformer models, from a laptop CPU to thousands of GPUs.

Importing this package imports neither torch nor any optional library.
"""

import sys as _sys

__version__ = "0.1.0"

if _sys.argv[:1] == ["-m"]:  # Python is looking for the module of `python -m`
    from shardtrain.utils import as_module as _as_module

    _as_module.refuse_without_program(_sys.orig_argv)
