"""The verb ``plan``: memory, time and the best mesh of a configuration. The planned machines need
not exist.
"""
