"""The Ray Serve application, and one command's worth of running it.

`RAY_ADDRESS` names a cluster that is there already; without it one is started on this machine, for as long as this
process runs.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, HTTPOptions, RequestRouterConfig
from starlette.types import ASGIApp

from kv_common.errors import JaxkvError
from kv_serving.replicas.front import Front
from kv_serving.replicas.replica import Replica, ReplicaFailedError
from kv_serving.replicas.router import PrefixRouter
from kv_serving.server.guard import Guard
from kv_serving.server.run import Loaded, ServerSettings

APP = "jaxkv"
REPLICA = "replica"


class ScalingError(JaxkvError):
    """Numbers of replicas that contradict each other."""


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """How many replicas there are, and how requests find them.

    Attributes:
        replicas: how many at least.
        max_replicas: how many at most; more than `replicas` scales with the load.
        target_requests: requests of one replica that scaling aims at.
        up_after_s: for how many seconds there have to be too many requests before there are more replicas.
        down_after_s: and too few before there are fewer.
        most_behind: how many requests busier than the least busy replica one may be that has a prompt cached.
        summary_s: seconds between two looks at what replicas have cached.
    """

    replicas: int
    max_replicas: int
    target_requests: float = 16
    up_after_s: float = 30.0
    down_after_s: float = 600.0
    most_behind: int = 8
    summary_s: float = 1.0

    def __post_init__(self) -> None:
        if not 1 <= self.replicas <= self.max_replicas:
            raise ScalingError(
                f"{self.replicas} replicas and at most {self.max_replicas}: give at least 1, and no less at most"
            )

    def options(self) -> dict[str, Any]:
        """Of a deployment."""
        if self.max_replicas == self.replicas:
            return {"num_replicas": self.replicas}
        scaling = AutoscalingConfig(
            min_replicas=self.replicas,
            max_replicas=self.max_replicas,
            target_ongoing_requests=self.target_requests,
            upscale_delay_s=self.up_after_s,
            downscale_delay_s=self.down_after_s,
            look_back_period_s=self.up_after_s,
            metrics_interval_s=self.up_after_s / 3,
        )
        return {"autoscaling_config": scaling}


def build(
    settings: ServerSettings, load: Callable[[], Loaded], scaling: Scaling, log_level: str = "info", devices: int = 1
) -> serve.Application:
    """The application; `load` is called in each replica, which gets so many GPUs if Ray has any."""
    keys, max_body_bytes, most = settings.api_keys, settings.limits.max_body_bytes, settings.limits.max_concurrent

    def front() -> ASGIApp:
        return Guard(Front(serve.get_deployment_handle(REPLICA, app_name=APP)), keys, max_body_bytes)

    replica = serve.deployment(
        name=REPLICA,
        max_ongoing_requests=most,
        max_queued_requests=most,
        graceful_shutdown_timeout_s=settings.drain_s,
        ray_actor_options={"num_cpus": 1, "num_gpus": devices if ray.cluster_resources().get("GPU") else 0},
        request_router_config=RequestRouterConfig(
            request_router_class=PrefixRouter,
            request_router_kwargs={"most_behind": scaling.most_behind},
            request_routing_stats_period_s=scaling.summary_s,
        ),
        **scaling.options(),
    )(Replica)
    fronts = serve.deployment(
        name="front",
        max_ongoing_requests=most * scaling.max_replicas,
        graceful_shutdown_timeout_s=settings.drain_s,
        ray_actor_options={"num_cpus": 0},
    )(serve.ingress(front)())
    return fronts.bind(replica.bind(settings, load, log_level))


def run(
    settings: ServerSettings, load: Callable[[], Loaded], scaling: Scaling, log_level: str = "info", devices: int = 1
) -> None:
    """Serve until SIGTERM or SIGINT; what is being answered then goes on for `drain_s` seconds at most.

    Raises ReplicaFailedError where they cannot start.
    """
    # CPUs are only counted, so replicas beyond the cores of a single machine would wait for ever.
    counted = None if "RAY_ADDRESS" in os.environ else max(scaling.max_replicas, os.cpu_count() or 1)
    ray.init(num_cpus=counted, include_dashboard=False)
    for number in (signal.SIGTERM, signal.SIGINT):  # not before, for Ray puts its own in their place
        signal.signal(number, lambda *_: sys.exit(0))
    try:
        serve.start(http_options=HTTPOptions(host=settings.host, port=settings.port))
        try:
            serve.run(build(settings, load, scaling, log_level, devices), name=APP, route_prefix="/")
        except RuntimeError as error:  # Ray's word for it, with all that happened in its text
            raise ReplicaFailedError("no replica could start; see what they say above") from error
        threading.Event().wait()
    finally:
        serve.shutdown()
        ray.shutdown()
