"""Set-up for all tests: one thread per process, so that ranks do not fight for cores."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
