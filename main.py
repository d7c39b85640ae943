"""``python main.py --params=parameters.yml``, as pytorch_universal_trainer is started; see shardtrain/compat/main.py.

It works from any folder, and may be copied beside a parameters.yml where the package is installed.
"""

import sys

from shardtrain.compat.main import main

if __name__ == "__main__":
    sys.exit(main())
