"""The execution layer: pools, the jitted step, sampling, and the engine over them."""

from kv_execution.adapters import AdapterNameError, Adapters, NoFreeAdapterSlotError
from kv_execution.batcher import Batcher, PromptError
from kv_execution.config import EngineConfig, EngineConfigError
from kv_execution.embedding import EmbeddingError
from kv_execution.engine import NotInitializedError, PagedEngine
from kv_execution.engine_values import EnginePlan, EngineStats
from kv_execution.held_requests import PrefillResult
from kv_execution.process_group import ProcessGroup
from kv_execution.process_meeting import ProcessGroupError
from kv_execution.processes import join_processes
from kv_execution.requests import GenerationResult, NanLogitsError, TokenLogprob, TokenOutput
from kv_execution.runtime import InterruptedStepError
from kv_execution.sampling_params import SamplingParams, SamplingParamsError
from kv_kernels.peers import PeerLostError

__all__ = [
    "AdapterNameError",
    "Adapters",
    "Batcher",
    "EmbeddingError",
    "EngineConfig",
    "EngineConfigError",
    "EnginePlan",
    "EngineStats",
    "GenerationResult",
    "InterruptedStepError",
    "NanLogitsError",
    "NoFreeAdapterSlotError",
    "NotInitializedError",
    "PagedEngine",
    "PeerLostError",
    "PrefillResult",
    "ProcessGroup",
    "ProcessGroupError",
    "PromptError",
    "SamplingParams",
    "SamplingParamsError",
    "TokenLogprob",
    "TokenOutput",
    "join_processes",
]
