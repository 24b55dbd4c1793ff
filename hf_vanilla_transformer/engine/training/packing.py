"""Leaving the padding of a batch out of what is computed of each position by itself."""

import torch
from torch import Tensor

from ..cpu import CPU


class Packing:
    """Which positions of a batch are none of padding.

    Args:
        keep_mask: True where there is no padding, (B, T); None: nothing is left out.
    """

    def __init__(self, keep_mask: Tensor | None = None) -> None:
        self.places = None if keep_mask is None else keep_mask.flatten().nonzero().squeeze(1)  # (N,)
        self.shape = torch.Size() if keep_mask is None else keep_mask.shape

    @classmethod
    def where_worthwhile(cls, keep_mask: Tensor) -> "Packing":
        """Leaves padding out of a batch, (B, T), that has enough of it."""
        return cls(keep_mask if 0 < keep_mask.float().mean() < 1 - CPU.padding_worth_packing else None)

    def __bool__(self) -> bool:
        return self.places is not None

    def pack(self, x: Tensor) -> Tensor:
        """Takes the real positions out of (B, T, d): (N, d). What is packed already is returned as it is."""
        return x if self.places is None or x.ndim == 2 else x.flatten(0, 1).index_select(0, self.places)

    def unpack(self, x: Tensor) -> Tensor:
        """Puts (N, d) back into its places: (B, T, d), 0 at padding."""
        if self.places is None:
            return x
        rows = x.new_zeros(self.shape.numel(), x.shape[-1])
        return rows.index_copy_(0, self.places, x).view(*self.shape, -1)

    def split(self, x: Tensor, head_dim: int) -> Tensor:
        """Unpacks what was projected for h heads, (N or B, T, h * head_dim): (B, h, T, head_dim)."""
        x = self.unpack(x)
        return x.view(*x.shape[:-1], -1, head_dim).transpose(1, 2)


def up_to_last(labels: Tensor) -> Tensor:
    """Tells which positions of labels, (B, T), have a label at or after them: what follows is padding."""
    return labels.ne(-100).flip(-1).cumsum(dim=-1).flip(-1) > 0
