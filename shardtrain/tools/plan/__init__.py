"""The verb ``plan``: memory, time and the best mesh of a configuration on machines that need not be there."""
