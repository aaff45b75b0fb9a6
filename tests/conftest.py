"""Settings for all tests."""

from hypothesis import settings

# A shared machine is slow at times; what takes too long is pytest-timeout's to say.
settings.register_profile("fullshard", deadline=None)
settings.load_profile("fullshard")
