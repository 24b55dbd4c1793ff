"""Batches without their padding."""

import pytest
import torch

from hf_vanilla_transformer.engine.training.packing import Packing, up_to_last


def test_packing_takes_padding_out_and_puts_it_back():
    real = torch.tensor([[1, 1, 0], [0, 1, 1], [0, 0, 0]]).bool()
    x = torch.arange(18.0).view(3, 3, 2).requires_grad_()
    packing = Packing(real)
    packed = packing.pack(x)
    assert torch.equal(packed, x[real])
    assert torch.equal(packing.unpack(packed), x * real[..., None])
    packing.unpack(packed).sum().backward()
    assert torch.equal(x.grad, real[..., None].expand(3, 3, 2).float())
    assert packing.split(packed, 1).shape == (3, 2, 3, 1)


def test_nothing_is_left_out_without_a_mask():
    x = torch.randn(2, 3, 4)
    assert Packing().pack(x) is x
    assert Packing().unpack(x) is x


def test_what_is_packed_is_not_packed_again():
    packing = Packing(torch.tensor([[True, False], [True, True]]))
    packed = packing.pack(torch.randn(2, 2, 4))
    assert packing.pack(packed) is packed


@pytest.mark.parametrize(("padding", "leaves_out"), [(0, False), (9, False), (11, True), (100, False)])
def test_padding_is_left_out_where_that_pays(padding, leaves_out):
    keep_mask = torch.ones(10, 10, dtype=torch.bool)
    keep_mask.view(-1)[:padding] = False
    assert bool(Packing.where_worthwhile(keep_mask)) == leaves_out


def test_targets_up_to_the_last_label_are_real():
    labels = torch.tensor([[5, -100, 6, -100], [-100, 5, -100, -100], [-100] * 4, [5, 6, 7, 8]])
    assert up_to_last(labels).long().tolist() == [[1, 1, 1, 0], [1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]]
