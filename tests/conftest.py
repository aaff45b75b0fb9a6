"""Settings for all tests, and what several of them need."""

import gc
from collections.abc import Iterator

import pytest
from hosts import Host, NoHosts, two_hosts
from hypothesis import settings
from shared_ranks import end_shared_ranks

# A shared machine is slow at times; what takes too long is pytest-timeout's to say.
settings.register_profile("fullshard", deadline=None)
settings.load_profile("fullshard")


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[Host, Host]]:
    """Two hosts with a cable between them, where the system allows it."""
    try:
        with two_hosts() as made:
            yield made
    except NoHosts as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="session", autouse=True)
def _own_settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What `fullshard calibrate` has written for this user is neither read nor replaced."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("settings")))
        yield


@pytest.fixture(scope="module", autouse=True)
def _ranks_of_one_module() -> Iterator[None]:
    """Start each test module with new ranks, and without garbage.

    Existing objects, such as modules and the tests themselves, are excluded from later garbage collections. A dry run
    begins with one, which would take longer than the run.
    """
    gc.collect()
    gc.freeze()
    yield
    end_shared_ranks()
