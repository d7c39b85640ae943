"""Watchdog that detects hangs without the process group, and names the rank and phase that did not arrive.

Each rank writes a heartbeat to the run's store every two seconds, and a few ranks read all heartbeats.
``hang_detector`` contains the rules for hangs, ``stragglers`` those for slow ranks and for ranks that
diverged, ``watchdog`` the threads.
"""
