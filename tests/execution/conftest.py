"""What the tests of several parts of the engine share."""

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture
def without_optimizations() -> Iterator[None]:
    """For interpreted kernels, which are long programs and short runs."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
