"""One of two processes that train models with plans in torch's wrappers: `python -m tests.support.wrapped_worker FOLDER`.

Each has half of a batch. FOLDER/RANK.json gets the largest differences, relative to the largest number, from one process with
the whole batch, and whether the same tokens were kept.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import tokensieve
from tests.support import vlm_models
from tests.support.engine_models import images, make_tower

TOWER_PLANS = ("anchor@2:8(k=3)", "tome@1:20 + cover@3:6")
VLM_PLANS = ("anchor@2:12(k=3) + random@llm.3:6", "fastv@llm.2:12")


def tower(family: str) -> tuple[nn.Module, list[nn.Module], Callable[[nn.Module, slice], Tensor]]:
    """A tower, its blocks, and what is computed of a part of the batch."""
    model: Any = make_tower(family).double()
    pixels = images(4, 0).double()
    blocks = model.transformer.resblocks if family == "open_clip" else model.blocks
    return model, list(blocks), lambda held, part: held(pixels[part])


def vlm() -> tuple[nn.Module, list[nn.Module], Callable[[nn.Module, slice], Tensor]]:
    model, batch = vlm_models.in_float64(vlm_models.llava(), vlm_models.prompts((1,) * 4, (5,) * 4))
    layers = [*model.model.language_model.layers, *model.model.vision_tower.encoder.layers]
    return model, layers, lambda held, part: held(**{name: values[part] for name, values in batch.items()}).logits


def distributed(model: nn.Module, blocks: list[nn.Module]) -> nn.Module:
    return DistributedDataParallel(model, find_unused_parameters=True)


def fully_sharded(model: nn.Module, blocks: list[nn.Module]) -> nn.Module:
    policy = ModuleWrapPolicy({type(block) for block in blocks})
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, use_orig_params=True, device_id=torch.device("cpu"))


def sharded(model: nn.Module, blocks: list[nn.Module]) -> nn.Module:
    for block in blocks:
        fully_shard(block)
    fully_shard(model)
    return model


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {}
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
            return {_plain(n): p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            grad = parameter.grad
            found[_plain(name)] = grad.full_tensor() if isinstance(grad, DTensor) else grad
    return found


def _plain(name: str) -> str:
    return name.removeprefix("module.").replace("_fsdp_wrapped_module.", "")


def differences(make: Callable[[], Any], wrap: Callable[..., nn.Module], plan: str, rank: int) -> dict[str, Any]:
    alone, _, run = make()
    with tokensieve.apply(alone, plan) as handle, handle.call(samples=torch.arange(4)):
        whole = run(alone, slice(None))
        kept = handle.kept
        whole.square().sum().backward()
    part = slice(0, 2) if rank == 0 else slice(2, 4)
    model, blocks, run = make()
    held = wrap(model, blocks)
    with tokensieve.apply(held, plan) as handle, handle.call(samples=torch.arange(4)[part]):
        out = run(held, part)
        is_kept = kept is not None and torch.equal(handle.kept, kept[part])
        (2 * out.square().sum()).backward()  # gradients are averaged over two processes
    assert not handle.is_attached
    known, found = gradients(alone), gradients(held)
    assert known.keys() == {name for name in found if name in known} and known
    largest = max(float(grad.abs().max()) for grad in known.values())
    return {
        "kept": is_kept,
        "output": float((out - whole[part]).abs().max() / whole.abs().max()),
        "gradient": max(float((found[name] - grad).abs().max()) for name, grad in known.items()) / largest,
    }


def main(folder: Path) -> None:
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    results = {}
    models = {"open_clip": (partial(tower, "open_clip"), TOWER_PLANS), "timm": (partial(tower, "timm"), TOWER_PLANS)}
    for name, (make, plans) in {**models, "llava": (vlm, VLM_PLANS)}.items():
        for wrap in (distributed, fully_sharded, sharded):
            for plan in plans:
                results[f"{name} {wrap.__name__} {plan}"] = differences(make, wrap, plan, rank)
    (folder / f"{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
