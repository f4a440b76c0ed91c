"""Comparing models and states to the bit."""

from __future__ import annotations

import torch


def snapshot(model):
    """All that apply could leave behind: values, hooks, instance attributes."""
    hooks = [(n, len(m._forward_hooks), len(m._forward_pre_hooks)) for n, m in model.named_modules()]
    names = [(n, sorted(m.__dict__)) for n, m in model.named_modules()]
    return {k: v.clone() for k, v in model.state_dict().items()}, hooks, names


def assert_untouched(model, before):
    after = snapshot(model)
    assert list(before[0]) == list(after[0]) and all(torch.equal(before[0][k], after[0][k]) for k in before[0])
    assert before[1:] == after[1:]


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b) and a.dtype == b.dtype
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return a == b and type(a) is type(b)
