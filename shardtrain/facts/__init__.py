"""Facts that several parts of the package need. Standard library only.

Accelerators, dtypes, file kinds, learning-rate schedules and optimizers.
"""
