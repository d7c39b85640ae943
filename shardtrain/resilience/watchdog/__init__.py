"""A watchdog that does not use the process group.

It detects hangs, and names the rank and phase that did not arrive.

Each rank writes a heartbeat to the run's store every two seconds, and a few ranks read all heartbeats.
``hang_detector`` has the rules for hangs, ``stragglers`` the rules for slow ranks and for ranks that
diverged, ``watchdog`` the threads.
"""
