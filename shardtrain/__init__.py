"""shardtrain: one trainer for large transformer models, from a laptop CPU to thousands of GPUs.

Importing this package imports neither torch nor any optional library.
"""

__version__ = "0.1.0"
