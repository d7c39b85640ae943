"""A watchdog beside the process group: hangs are found, and the rank and phase that did not arrive are named.

Each rank writes a heartbeat to the run's store every two seconds, and a few ranks read those of all.
``hang_detector`` holds the rules for hangs, ``stragglers`` those for slow ranks and for ranks that diverged,
``watchdog`` the threads.
"""
