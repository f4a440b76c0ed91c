"""Models inside what others put around them: adapters of PEFT, and torch's wrappers for several devices or processes.

A plan is put on the inner model, so it holds however the model is called: through its wrapper or itself.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from tokensieve.errors import UserError

NO_REPLICAS = (
    "torch.nn.DataParallel cannot run a model with a plan: its replicas would use the weights of the original; "
    "use DistributedDataParallel with a process for each device"
)


def unwrap(model: nn.Module) -> nn.Module:
    """The model that was given to PEFT, DistributedDataParallel or FullyShardedDataParallel, one in another or none."""
    while (inner := _inside(model)) is not None:
        model = inner
    return model


def unwrap_each(layers: Iterable[nn.Module]) -> list[nn.Module]:
    """The layers themselves, without the wrappers of FullyShardedDataParallel, which gathers weights around their forward."""
    return [layer.module if _is_sharded(layer) else layer for layer in layers]  # type: ignore[misc]


def own_class(module: nn.Module) -> type[nn.Module]:
    """The class of a module, as its library made it: `fully_shard` puts one of its own before it."""
    return next(base for base in type(module).__mro__ if not base.__module__.startswith("torch.distributed."))


def without_adapter(module: nn.Module) -> nn.Module:
    """The layer that PEFT has put an adapter on; the layer itself where there is none."""
    inner: nn.Module = module.get_base_layer() if _is_adapted(module) else module  # type: ignore[operator]
    return inner


def attention_weights(attention: Any) -> tuple[Tensor, Tensor]:
    """The weights of q, k and v in one (3D, D) and of the output (D, D) of an nn.MultiheadAttention, with those of an adapter.

    PEFT merges them while the attention's forward runs, which a plan that needs attention scores does not call.
    """
    if not _is_adapted(attention) or attention.disable_adapters or attention.merged:
        return attention.in_proj_weight, attention.out_proj.weight
    attention.merge(adapter_names=[name for name in attention.active_adapters if name in attention.lora_A])
    try:
        return attention.in_proj_weight, attention.out_proj.weight
    finally:
        attention.unmerge()


def _inside(model: Any) -> nn.Module | None:
    """The model in a wrapper; None: this is none."""
    if isinstance(model, nn.DataParallel):
        raise UserError(NO_REPLICAS)
    if isinstance(model, nn.parallel.DistributedDataParallel) or _is_sharded(model):
        return model.module
    peft = sys.modules.get("peft")  # where it was not imported, no model can be one of its
    if peft is None or not isinstance(model, (peft.PeftModel, peft.PeftMixedModel)):
        return None
    if isinstance(model, peft.PeftModel) and model.active_peft_config.is_prompt_learning:
        raise UserError(
            "this adapter of PEFT puts learned tokens before the prompt, which a plan would take for others; "
            "use LoRA or another adapter of the weights"
        )
    return model.get_base_model()


def _is_sharded(module: nn.Module) -> bool:
    """Whether this is a wrapper of FSDP (`fully_shard`, its successor, wraps nothing)."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel)


def _is_adapted(module: nn.Module) -> bool:
    return type(module).__module__.startswith("peft.tuners.") and hasattr(module, "get_base_layer")
