"""The paper's functions of tensors, each on the cases at its edges."""

from types import SimpleNamespace

import pytest
import torch

from hf_vanilla_transformer.integration_vanilla_transformer import TargetsMixin
from hf_vanilla_transformer.modeling_vanilla_transformer import label_smoothed_cross_entropy, shift_right


def targets(start=1, pad=0):
    """What the mixin needs of a model."""
    mixin = TargetsMixin()
    mixin.config = SimpleNamespace(decoder_start_token_id=start, pad_token_id=pad)
    return mixin


# ---- targets shifted right ----
@pytest.mark.parametrize(
    ("labels", "shifted"),
    [
        ([5, 6, 7], [1, 5, 6]),
        ([5], [1]),
        ([5, 6, -100, -100], [1, 5, 6, 0]),
        ([-100, -100, 5, 6], [0, 0, 1, 5]),
        ([-100, 5, 6, -100], [0, 1, 5, 6]),
        ([5, -100, 6, 7], [1, 5, 0, 6]),  # a target that isn't learned, in the middle
        ([-100, -100], [1, 0]),
        ([-100], [1]),
        ([0, 1, 2], [1, 0, 1]),  # special tokens are tokens
    ],
)
def test_shift_right(labels, shifted):
    labels = torch.tensor([labels, labels])
    before = labels.clone()
    assert shift_right(labels, start=1, pad=0).tolist() == [shifted, shifted]
    assert torch.equal(labels, before)


@pytest.mark.parametrize(("start", "pad"), [(None, 0), (1, None)])
def test_shift_right_needs_both_tokens(start, pad):
    with pytest.raises(ValueError, match=r"decoder_start_token_id.*pad_token_id"):
        shift_right(torch.tensor([[5]]), start, pad)


# ---- label_smoothed_cross_entropy ----
LABELS = torch.tensor([[3, 0, -100], [-100, 4, -100]])


def smoothed(logits, labels, epsilon):
    """The sum over targets, in float64: q is 1 - epsilon on the target and epsilon / V on every token besides."""
    total = 0.0
    for row, label in zip(logits.flatten(0, 1).double(), labels.flatten().tolist(), strict=True):
        if label != -100:
            q = torch.full_like(row, epsilon / len(row))
            q[label] += 1 - epsilon
            total -= (q * row.log_softmax(-1)).sum()
    return total


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_loss_is_computed_in_float32_at_least(dtype):
    logits = (10 * torch.randn(2, 3, 5)).to(dtype)
    loss = label_smoothed_cross_entropy(logits, LABELS, label_smoothing=0.1)
    assert loss.dtype == torch.promote_types(dtype, torch.float32)
    torch.testing.assert_close(loss.double(), smoothed(logits, LABELS, 0.1) / 3, rtol=1e-6, atol=1e-6)


# ---- padding on the left of a target ----
def test_left_padding_is_masked_and_right_padding_is_not():
    right, left = torch.tensor([[1, 5, 0]]), torch.tensor([[0, 1, 5]])
    assert targets().mask_of_left_padding(right, None).tolist() == [[True, True, True]]
    assert targets().mask_of_left_padding(left, None).tolist() == [[False, True, True]]
    assert targets().mask_of_left_padding(None, torch.tensor([[5, 6, -100]])).tolist() == [[True, True, True]]
    assert targets().mask_of_left_padding(None, torch.tensor([[-100, 5, 6]])).tolist() == [[False, True, True]]
    assert targets().mask_of_left_padding(None, None) is None
    assert targets(0, 0).mask_of_left_padding(left, None) is None  # padding can't be told from the start
