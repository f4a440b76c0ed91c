"""Fingerprints of models: of the weights, and of all that their features depend on."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

import torch

UNRELATED = (  # to what a model computes: attributes of modules and entries of configurations
    *("training", "name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype"),
    *("id2label", "label2id", "pretrained_cfg", "default_cfg"),
)


def fingerprint(model: torch.nn.Module) -> str:
    """SHA-256 over names, types and values of all weights."""
    state = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        state.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        state.update(memoryview(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()))
    return state.hexdigest()[:32]


def identity(model: torch.nn.Module, transform: Any) -> str:
    """What features depend on: the fingerprint of the weights, then one of the architecture and the transform.

    The architecture is the class and the plain settings of every module (heads, scale, pooling, ...), and the configuration
    where there is one. Names, places on the disk and versions are left out.
    """
    lines = [re.sub(r" at 0x[0-9a-f]+", "", repr(transform))]
    configs = {}
    for name, module in model.named_modules():
        settings = {key: _plain(value) for key, value in vars(module).items() if _related(key)}
        settings = {key: value for key, value in settings.items() if value is not None}
        lines.append(json.dumps([name, type(module).__qualname__, settings], sort_keys=True))
        config: Any = getattr(module, "config", None)
        if hasattr(config, "to_dict"):
            configs[id(config)] = _plain(config.to_dict())
    lines.extend(json.dumps(config, sort_keys=True) for config in configs.values())
    return f"{fingerprint(model)}-{hashlib.sha256(chr(10).join(lines).encode()).hexdigest()[:16]}"


def _plain(value: Any) -> Any:
    """Numbers, texts, names of functions, and lists and tables of such; None for all else."""
    if isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items() if _related(str(key))}
    return getattr(value, "__name__", None)


def _related(key: str) -> bool:
    return key not in UNRELATED and not key.startswith("_")
