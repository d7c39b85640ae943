"""Facts that several parts of the package need. Standard library only.

File kinds, accelerators, learning-rate schedules, and sizes in memory.
"""
