"""Set-up for the tests in tests/ and the doctests in shardtrain/: see tests/tiers.py."""

from hypothesis import settings

pytest_plugins = ("tiers",)

settings.register_profile("untimed", deadline=None)  # a busy machine is no failure: time is asserted nowhere
settings.load_profile("untimed")
