"""A collective that fails is named as what it is, and an error of our own stays what it is."""

import jax
import pytest

from kv_common.errors import JaxkvError
from kv_kernels import peers
from kv_kernels.peers import PeerLostError, together


@pytest.fixture(autouse=True)
def waits(monkeypatch):
    """The seconds that were waited for a lifeline to speak first."""
    waited = []
    monkeypatch.setattr(peers.time, "sleep", waited.append)
    return waited


@pytest.mark.parametrize("kind", [jax.errors.JaxRuntimeError, ValueError])
def test_a_collective_that_fails_is_a_lost_peer_in_one_line_behind_the_lifelines(kind, waits):
    with (
        pytest.raises(
            PeerLostError, match=r"^a step of 2 processes failed, .* \(Gloo: reset by peer\): start all"
        ) as lost,
        together("a step", 2),
    ):
        raise kind("Gloo:\n  reset by peer")
    assert isinstance(lost.value.__cause__, kind)
    assert len(waits) > 10, "a pause of the machine has to cost one of many"
    assert sum(waits) == pytest.approx(peers.VERDICT_S)


def test_one_process_has_no_peers_to_lose(waits):
    with pytest.raises(jax.errors.JaxRuntimeError, match="out of memory"), together("a step", 1):
        raise jax.errors.JaxRuntimeError("out of memory")
    assert waits == []


def test_an_error_of_our_own_stays_what_it_is(waits):
    with pytest.raises(JaxkvError, match="too long") as kept, together("a step", 2):
        raise JaxkvError("too long")
    assert type(kept.value) is JaxkvError
    assert waits == []
