"""Writes LoRA adapters for the golden models, as PEFT saves them, and the models with an adapter merged in."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

PREFIX = "base_model.model."


def adapted_modules(case: Path, ends: tuple[str, ...]) -> dict[str, tuple[int, int]]:
    """[out, in] of every module of a golden model whose name ends like one of `ends`."""
    tensors = load_file(case / "model.safetensors")
    names = {name.removesuffix(".weight") for name in tensors if name.startswith("model.layers.")}
    return {name: tensors[f"{name}.weight"].shape for name in sorted(names) if name.endswith(ends)}


def write_adapter(
    to: Path,
    case: Path,
    ends: tuple[str, ...],
    *,
    seed: int = 0,
    rank: int = 4,
    extra: dict[str, np.ndarray] | None = None,
    **config: Any,
) -> Path:
    """An adapter of the modules that end like `ends`, its tensors large enough to change every answer."""
    rng = np.random.default_rng(seed)
    tensors: dict[str, np.ndarray] = {}
    for name, (out, into) in adapted_modules(case, ends).items():
        own = next((value for end, value in config.get("rank_pattern", {}).items() if name.endswith(end)), rank)
        tensors[f"{PREFIX}{name}.lora_A.weight"] = rng.standard_normal((own, into)).astype(np.float32) * into**-0.5
        tensors[f"{PREFIX}{name}.lora_B.weight"] = rng.standard_normal((out, own)).astype(np.float32) * own**-0.5
    tensors |= extra or {}
    fields = {
        **{"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "x", "bias": "none", "r": rank},
        **{"lora_alpha": 2, "target_modules": list(ends), "lora_dropout": 0.1, "inference_mode": True},
        **{"use_dora": False, "modules_to_save": None, "init_lora_weights": True},
        **config,
    }
    to.mkdir(parents=True, exist_ok=True)
    save_file(tensors, to / "adapter_model.safetensors")
    (to / "adapter_config.json").write_text(json.dumps(fields))
    return to


def write_merged(to: Path, case: Path, adapter: Path, scale_of: dict[str, float] | float) -> Path:
    """The golden model with W + scale * B @ A in the place of W; `scale_of` by the end of a module's name, or one."""
    tensors = load_file(case / "model.safetensors")
    pairs = load_file(adapter / "adapter_model.safetensors")
    for name in [name for name in pairs if name.endswith(".lora_A.weight")]:
        module = name.removeprefix(PREFIX).removesuffix(".lora_A.weight")
        scale = scale_of if isinstance(scale_of, float) else scale_of[module.rsplit(".", 1)[-1]]
        delta = pairs[name.replace("lora_A", "lora_B")].astype(np.float64) @ pairs[name].astype(np.float64)
        tensors[f"{module}.weight"] = (tensors[f"{module}.weight"] + scale * delta).astype(np.float32)
    to.mkdir(parents=True, exist_ok=True)
    for file in ("config.json", "generation_config.json"):
        shutil.copy(case / file, to)
    save_file(tensors, to / "model.safetensors")
    return to
