"""Entries of the attention equal those of the whole matrix, which only the test builds."""

import pytest
import torch
from torch.nn.functional import normalize

from tests.support.rounding import assert_near
from tokensieve import scoring
from tokensieve.scoring import Attention, attend, cosine, minmax, top


def whole_matrix(q, k, scale, bias=None):
    """softmax(q k^T * scale + bias), head by head and row by row, in float64: (B, T, T), mean over heads."""
    batch, heads, length, _ = q.shape
    q, k, bias = q.double(), k.double(), None if bias is None else bias.double()
    out = torch.zeros(batch, length, length, dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            for i in range(length):
                logits = torch.stack([(q[b, h, i] * k[b, h, j]).sum() * scale for j in range(length)])
                if bias is not None:
                    logits = logits + bias[b, 0, 0]
                out[b, i] += (logits.exp() / logits.exp().sum()) / heads
    return out


@pytest.fixture(params=["plain", "biased"])
def parts(request):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 3, 11, 8)
    bias = torch.rand(2, 1, 1, 11) * 3 if request.param == "biased" else None
    return q, k, v, bias


@pytest.mark.parametrize("kernel_gives_lse", [True, False])
@pytest.mark.parametrize("rows_at_once", [4, 128])
def test_entries_are_those_of_the_whole_matrix(parts, kernel_gives_lse, rows_at_once, monkeypatch):
    monkeypatch.setattr(scoring, "ROWS_AT_ONCE", rows_at_once)
    q, k, v, bias = parts
    p, scale = 2, 8**-0.5
    lse = attend(q, k, v, bias, scale)[1] if kernel_gives_lse else None
    seen = Attention(q, k, p, scale, bias, lse)
    matrix = whole_matrix(q, k, scale, bias)
    assert_near(seen.cls_row(), matrix[:, 0, p:], steps=100)
    index = torch.tensor([[0, 3, 8], [1, 2, 5]])
    wanted = torch.stack([matrix[b, p:][:, p + index[b]] for b in range(2)])
    assert_near(seen.columns(index), wanted, steps=100)
    assert_near(seen.received(), matrix.mean(1)[:, p:], steps=100)
    assert_near(seen.keys(), k.double().mean(1)[:, p:], steps=100)


def test_selected_entries_are_not_normalised_anew(parts):
    q, k, _, bias = parts
    whole = Attention(q, k, 1, 8**-0.5, bias)
    index = torch.tensor([[0, 4, 7], [2, 3, 9]])
    part = whole.select(index)
    assert_near(part.cls_row(), whole.cls_row().gather(1, index), steps=100)
    for b in range(2):
        column = part.columns(torch.tensor([[1], [1]]))[b, :, 0]
        assert_near(column, whole.columns(index[:, 1:2])[b, index[b], 0], steps=100)


def test_attend_is_the_softmax_mean(parts):
    q, k, v, bias = parts
    out, lse = attend(q, k, v, bias, 8**-0.5)
    logits = q.double() @ k.double().transpose(-1, -2) * 8**-0.5 + (0 if bias is None else bias.double())
    assert_near(out, logits.softmax(-1) @ v.double(), steps=100)
    assert_near(lse, logits.logsumexp(-1), steps=100)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_bias_is_the_one_that_the_kernel_saw(dtype):
    """log(size) is rounded to the model's type in the kernel; exact entries against its log-sum-exp would not add up to 1.

    Kernels of 16 bits differ from CPU to CPU in what they round on the way; so all biases lie almost half a step above what
    they are rounded to, and a quarter of that is allowed: entries by the exact bias would be off by all of it.
    """
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 3, 11, 8).to(dtype)
    step = 8 * torch.finfo(dtype).eps  # from one number to the next, between 8 and 16
    bias = 8 + step * (torch.randint(0, 24, (2, 1, 1, 11)) + 0.45)
    assert ((bias - bias.to(dtype).float()) / step).min() > 0.44
    seen = Attention(q, k, 0, 8**-0.5, bias, attend(q, k, v, bias, 8**-0.5)[1])
    columns = seen.columns(torch.arange(11).expand(2, -1))
    torch.testing.assert_close(columns.sum(-1), torch.ones(2, 11), rtol=0, atol=step / 8)
    rounded = whole_matrix(q, k, 8**-0.5, bias.to(dtype))
    torch.testing.assert_close(columns.double(), rounded, rtol=step / 8, atol=0)


def test_top_is_stable_and_in_raster_order():
    scores = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0], [0.0, 0.0, 0.0, 0.0, 0.0]])
    assert top(scores, 2).tolist() == [[1, 2], [0, 1]]
    assert top(scores.bfloat16(), 4).tolist() == [[0, 1, 2, 3], [0, 1, 2, 3]]


def test_minmax_of_equal_scores_is_zero_not_nan():
    assert minmax(torch.full((2, 5), 0.3)).eq(0).all()
    assert minmax(torch.tensor([[2.0, 4.0, 3.0]])).tolist() == [[0.0, 1.0, 0.5]]


def test_autocast_does_not_round_scores(parts):
    q, k, v, bias = parts
    seen, index = Attention(q, k, 1, 8**-0.5, bias, attend(q, k, v, bias, 8**-0.5)[1]), torch.tensor([[0, 3], [1, 2]])
    exact = seen.cls_row(), seen.columns(index), cosine(q[:, 0], k[:, 0])
    with torch.autocast("cpu", torch.bfloat16):
        mixed = seen.cls_row(), seen.columns(index), cosine(q[:, 0], k[:, 0])
    assert all(torch.equal(a, b) for a, b in zip(exact, mixed, strict=True))


def test_the_most_similar_token_is_found_in_blocks(monkeypatch):
    x, y = torch.randn(2, 37, 8), torch.randn(2, 5, 8)
    x[0, 3] = 0  # no direction: the first
    slow = (normalize(x.double(), dim=-1) @ normalize(y.double(), dim=-1).transpose(1, 2)).argmax(-1)
    assert torch.equal(scoring.most_similar(x, y), slow)
    monkeypatch.setattr(scoring, "MAX_ENTRIES", 80)
    assert torch.equal(scoring.most_similar(x, y), slow)
