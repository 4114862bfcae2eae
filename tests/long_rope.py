"""Models whose sequences outgrow the context of their training, made of golden ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from plain_decoder import plain_logits
from safetensors.numpy import load_file

ORIGINAL = 32
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * at for at in range(8)],
    "long_factor": [2.0 + 0.5 * at for at in range(8)],
}


class LongCase(NamedTuple):
    """A golden case, and what its configuration says instead."""

    name: str
    config: dict[str, Any]


LONGROPE_CASE = LongCase(
    "phi3",
    {
        "rope_parameters": LONGROPE,
        "max_position_embeddings": 128,
        "original_max_position_embeddings": ORIGINAL,
        "sliding_window": None,
    },
)
DYNAMIC_CASE = LongCase(
    "qwen2",
    {
        "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
        "max_position_embeddings": ORIGINAL,
    },
)


def write_long_case(golden: Path, directory: Path, case: LongCase) -> Path:
    """The golden model as the case has it, in a directory of its name below `directory`."""
    to = directory / case.name
    to.mkdir(parents=True)
    for name in ("model.safetensors", "generation_config.json"):
        (to / name).symlink_to(golden / case.name / name)
    config = json.loads((golden / case.name / "config.json").read_text()) | case.config
    (to / "config.json").write_text(json.dumps(config))
    return to


def plain_logits_of(directory: Path, ids: np.ndarray) -> np.ndarray:
    """Logits [tokens, vocab] f64 of the model in `directory` for one whole sequence."""
    config = json.loads((directory / "config.json").read_text())
    return plain_logits(config, load_file(directory / "model.safetensors"), ids)
