"""``python -m shardtrain`` is the ``shardtrain`` command."""

import sys

from shardtrain.cli import main

if __name__ == "__main__":
    sys.exit(main())
