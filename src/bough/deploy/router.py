"""The request router of Ray Serve that keeps sessions and prompt prefixes where they are cached."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from bough.deploy.replica import Order
from bough.deploy.routes import Hint, Routes


class PrefixRouter(RequestRouter):
    """Ranks replicas by session, prefix and load. Serve tries them in this order."""

    def initialize_state(self, **kwargs: Any) -> None:
        self._routes = Routes(kwargs["slots"], kwargs["queue"])
        # Serve's own record of loads forgets idle replicas, and would send a burst to one of them.
        self._ongoing: Counter[str] = Counter()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # after all ranks; else Serve polls
        by_name = {each.replica_id.unique_id: each for each in candidate_replicas}
        loads = {name: self._ongoing[name] for name in by_name}
        return [[by_name[name]] for name in self._routes.ranked(_hint(pending_request), loads)]

    def on_send_request(self, replica_id: ReplicaID) -> None:
        super().on_send_request(replica_id)
        self._ongoing[replica_id.unique_id] += 1

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._ongoing[replica_id.unique_id] -= 1

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        self._routes.record(_hint(pending_request), replica_id.unique_id)

    def update_replicas(self, replicas: Sequence[RunningReplica]) -> None:
        super().update_replicas(list(replicas))
        names = [each.replica_id.unique_id for each in replicas]
        self._routes.keep(names)
        self._ongoing = Counter({name: self._ongoing[name] for name in names})


def _hint(request: PendingRequest | None) -> Hint:
    orders = [each for each in request.args if isinstance(each, Order)] if request is not None else []
    return orders[0].hint if orders else Hint()
