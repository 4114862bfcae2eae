"""Several processes as one program: how they join, and agree.

Contract: the control plane runs in every process, replicated. Each submits the same requests in the same order, and
plans by counters and never by clocks or chance, so all of them dispatch the same steps and no page table travels; a
process that only followed would need one broadcast per step, before its device could begin. What is not deterministic
is agreed: seeds that nobody chose, and the clock of deadlines (process 0's).
"""

import hashlib
import secrets
from collections.abc import Callable, Iterator

import jax
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import PartitionSpec

from kv_execution.process_group import ProcessGroup
from kv_execution.process_meeting import ProcessGroupError, meet
from kv_execution.service_relay import ServiceRelay
from kv_kernels.peers import together
from kv_kernels.selection import current_platform
from kv_kernels.tensor_parallel import EXPERT, TENSOR_AXES, TensorMesh


def join_processes(coordinator: str, num_processes: int, process_id: int, *, timeout_s: float = 60) -> ProcessGroup:
    """Meet the other processes at `coordinator` (HOST:PORT, of process 0); before jax is used for anything.

    Call `leave` of what comes back when all work is done. `timeout_s`: how long to wait for peers to come, and then for
    them to be heard of.

    Raises:
        ProcessGroupError: bad numbers, an address that cannot be used, a peer that does not come or does not match.
    """
    host, _, meeting_port = coordinator.rpartition(":")
    if not (host and meeting_port.isdecimal() and 0 < int(meeting_port) < 1 << 16):
        raise ProcessGroupError(f"the coordinator is {coordinator!r}; give HOST:PORT of process 0")
    if num_processes < 2 or not 0 <= process_id < num_processes:
        raise ProcessGroupError(
            f"process {process_id} of {num_processes} cannot be: give at least 2 processes, and ids from 0 to one less"
        )
    host = host.strip("[]")
    lifelines, port = meet((host, int(meeting_port)), num_processes, process_id, timeout_s)
    group = ProcessGroup(process_id, num_processes, lifelines, timeout_s)
    behind_lifelines_s = round(2 * timeout_s + 10)  # which say what happened in one line
    # It would take SIGTERM as notice of a preemption, and a process that was told to end would go on.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        service = f"{host}:{port}" if process_id == 0 else ServiceRelay((host, port), timeout_s).address
        jax.distributed.initialize(
            service,
            num_processes,
            process_id,
            initialization_timeout=behind_lifelines_s,
            cluster_detection_method="deactivate",
            heartbeat_timeout_seconds=behind_lifelines_s,
            shutdown_timeout_seconds=behind_lifelines_s,
            coordinator_bind_address=service,
        )
    except (RuntimeError, OSError) as error:
        group.abandon()
        raise ProcessGroupError(
            f"process {process_id} met the others, but not jax's service at {host}:{port} "
            f"({' '.join(str(error).split())[:200]}): let that port through, and join before jax is used"
        ) from error
    group.end_behind_tracebacks()
    current_platform()  # or jax would say at length what it does not find
    _from_process_0(b"here")  # See `connect`: here all have just met, and later one may be slow to load.
    return group


def connect(mesh: TensorMesh | None) -> None:
    """Connect the devices of `mesh` that belong to several processes; all of these must call it at the same point.

    Gloo gives devices 30 s from the first to the last to come to the first collective that they share. So their first
    one is here, behind a broadcast: processes have been connected since they joined, and wait for the slowest.
    """
    if mesh is None or mesh.num_processes == 1:
        return
    _from_process_0(b"here")
    axes = (TENSOR_AXES, (*TENSOR_AXES, EXPERT)) if mesh.expert_shards > 1 else (TENSOR_AXES,)
    spec = PartitionSpec(TENSOR_AXES)
    met = jax.jit(mesh.manual(lambda ones: [lax.psum(ones, names) for names in axes], spec, spec))
    with together("a meeting", mesh.num_processes):
        ones = jax.make_array_from_callback((mesh.width,), mesh.sharding(spec), lambda _: np.ones(1, np.float32))
        jax.block_until_ready(met(ones))


def agreed_clock(clock: Callable[[], float], mesh: TensorMesh | None) -> Callable[[], float]:
    """`clock`, or process 0's reading of it where several processes have to see the same time.

    A reading then waits for the step in flight; it is taken only while some request has a deadline.
    """
    if mesh is None or mesh.num_processes == 1:
        return clock
    return lambda: float(np.frombuffer(_from_process_0(np.float64(clock()).tobytes()), np.float64)[0])


def seed_source(mesh: TensorMesh | None) -> Callable[[], int]:
    """Draws 63-bit seeds for requests that came without one; the same in every process of a mesh."""
    if mesh is None or mesh.num_processes == 1:
        return lambda: secrets.randbits(63)
    seeds = _agreed_seeds()
    return lambda: next(seeds)


def _agreed_seeds() -> Iterator[int]:
    root = _from_process_0(secrets.token_bytes(32))
    number = 0
    while True:
        yield (
            int.from_bytes(hashlib.blake2b(root + number.to_bytes(8, "little"), digest_size=8).digest(), "little") >> 1
        )
        number += 1


def _from_process_0(message: bytes) -> bytes:
    """Process 0's `message`, everywhere; all processes must call it at the same point."""
    with together("a broadcast", jax.process_count()):
        return np.asarray(multihost_utils.broadcast_one_to_all(np.frombuffer(message, np.uint8))).tobytes()
