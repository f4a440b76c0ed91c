"""The formulas of S1 and S2, and a tower that is cut, written slowly and independently of the package.

Meant for float64: hand in `in_float64(module)` and tokens or images in double.
"""

import copy

import torch
import torch.nn.functional as F


def in_float64(module):
    """A copy of the module that computes in double."""
    return copy.deepcopy(module).double()


def attention_matrix(block, x, log_sizes=None):
    """The block's own attention on its input, one head at a time: (B, T, T), mean over heads, softmax over all keys."""
    h = block.ln_1(x)
    attn = block.attn
    width, heads = x.shape[-1], attn.num_heads
    d = width // heads
    q, k, _ = (h @ attn.in_proj_weight.T + attn.in_proj_bias).split(width, dim=-1)
    matrix = torch.zeros(x.shape[0], x.shape[1], x.shape[1], dtype=x.dtype)
    for head in range(heads):
        part = slice(head * d, (head + 1) * d)
        qh, kh = q[..., part], k[..., part]
        if hasattr(attn, "ln_q"):
            qh, kh = attn.ln_q(qh), attn.ln_k(kh)
        logits = qh @ kh.transpose(1, 2) / d**0.5
        if log_sizes is not None:
            logits = logits + log_sizes[:, None]
        matrix += logits.softmax(-1) / heads
    return matrix


def anchor_choice(matrix, tokens, k, m, alpha, normalize="minmax"):
    """S1's selection for one image: matrix (1+N, 1+N), tokens (N, D) -> kept patches, anchors, scores.

    Refuses an image where a score is so near to the first one left out that rounding could decide.
    """
    n = len(tokens)
    coarse = [matrix[0, 1 + i].item() for i in range(n)]
    anchors = sorted(range(n), key=lambda i: (-coarse[i], i))[:k]
    importance = [sum(matrix[1 + i, 1 + j].item() for j in anchors) / len(anchors) for i in range(n)]
    diversity = [1 - max(F.cosine_similarity(tokens[i], tokens[j], dim=0).item() for j in anchors) for i in range(n)]
    if normalize == "minmax":
        importance, diversity = (
            [(v - min(values)) / (max(values) - min(values)) for v in values] for values in (importance, diversity)
        )
    scores = [alpha * i + (1 - alpha) * d for i, d in zip(importance, diversity, strict=True)]
    others = sorted((i for i in range(n) if i not in anchors), key=lambda i: (-scores[i], i))[:m]
    assert_clear(coarse, anchors)
    assert_clear([scores[i] if i not in anchors else None for i in range(n)], others)
    return sorted(anchors + others), sorted(anchors), scores


def assert_clear(scores, chosen, margin=1e-4):
    """The worst that is chosen is better than the best that is not by this share of the largest score (None: not asked)."""
    left = [score for i, score in enumerate(scores) if i not in chosen and score is not None]
    if left and len(chosen):
        gap = min(scores[i] for i in chosen) - max(left)
        assert gap > margin * max(abs(score) for score in scores if score is not None), "a near tie; draw other data"


def attention_branch(block, x, log_sizes=None):
    """x plus attention, by torch's own multi_head_attention with an explicit mask."""
    h = block.ln_1(x)
    mask = None
    if log_sizes is not None:
        mask = log_sizes[:, None, None].expand(-1, block.attn.num_heads, x.shape[1], -1).flatten(0, 1)
    return x + block.ls_1(block.attn(h, h, h, need_weights=False, attn_mask=mask)[0])


def mlp_branch(block, x):
    return x + block.ls_2(block.mlp(block.ln_2(x)))


def pruned_features(visual, images, layer, choose):
    """The image feature when choose(matrix (1+N,1+N), tokens (N, D)) -> kept list decides after `layer` blocks."""
    x = visual._embeds(images)
    kept = None
    for number, block in enumerate(visual.transformer.resblocks, start=1):
        arrived = x
        x = mlp_branch(block, attention_branch(block, x))
        if number == layer:
            matrix = attention_matrix(block, arrived)
            kept = [choose(matrix[b], x[b, 1:]) for b in range(len(x))]
            x = torch.stack([x[b, [0] + [1 + i for i in kept[b]]] for b in range(len(x))])
    pooled = visual.ln_post(x[:, 0]) @ visual.proj
    return pooled, kept
