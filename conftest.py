"""Set-up for the tests in tests/ and the doctests in shardtrain/: see tests/tiers.py."""

pytest_plugins = ("tiers",)
