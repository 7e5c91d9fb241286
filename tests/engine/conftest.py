"""What tests of engines share."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module")
def one_thread():
    """Engines on one thread: a tiny model gains nothing from a second, and barriers cost time slices on a busy machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield
