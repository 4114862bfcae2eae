"""Ray Serve's choice of a replica for a request, by prefix affinity and then by load.

Contract: a call brings the chain of its prompt as the keyword `chain`; one without goes to the least busy replica. What
replicas have cached comes with the statistics that Ray Serve collects from each (`record_routing_stats`), so it is
as old as `request_routing_stats_period_s` at most.
"""

import random

from ray.serve.request_router import PendingRequest, ReplicaID, ReplicaResult, RequestRouter, RunningReplica

from kv_serving.replicas.affinity import AffinityIndex

SUMMARY = "prefix_keys"
"""Under which the statistics of a replica have its summary."""


class PrefixRouter(RequestRouter):
    """Sends a prompt where most of it is cached."""

    def initialize_state(self, most_behind: int) -> None:
        """`most_behind` as of `AffinityIndex.ranked`."""
        self._index = AffinityIndex()
        self._most_behind = most_behind

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Groups of replicas, the best first; Ray Serve takes the least busy of the first that has room."""
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # where all are full, rather than ask again at once
        # In any order, for of equally busy ones Ray Serve takes the first.
        shuffled = random.sample(candidate_replicas, len(candidate_replicas))
        named = {replica.replica_id.unique_id: replica for replica in shuffled}
        self._index.keep(named)
        for name, replica in named.items():
            self._index.update(name, replica.routing_stats.get(SUMMARY, b""))
        loads = {name: self._replica_queue_len_cache.get(each.replica_id) or 0 for name, each in named.items()}
        return [
            [named[name] for name in group]
            for group in self._index.ranked(_chain(pending_request), loads, self._most_behind)
        ]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult) -> None:
        """The prompt will soon be cached where it went."""
        self._index.expect(replica_id.unique_id, _chain(pending_request))


def _chain(request: PendingRequest | None) -> bytes:
    chain: bytes = b"" if request is None else request.kwargs.get("chain", b"")
    return chain
