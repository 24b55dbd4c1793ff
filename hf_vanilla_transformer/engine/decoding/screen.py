"""The most probable token of each row, without all logits: for a greedy step, which needs no other number.

The projection to the vocabulary is mostly the largest matrix of a step. Its copy in 8 bits has a quarter of the bytes,
and gives each logit w x + b up to an error with a bound. With w = w' + dw and x = x' + dx, of which w' and x' are what
is left after rounding, w x - w' x' = dw x + w' dx, so that the error is at most |dw| |x| + |w'| |dx|. Only tokens that
come within two bounds of the best may have the largest logit; these logits are computed as they are.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from .linear import HIGHEST, Int8Linear, Linear, rounded_weight, scaled
from .search import Bar

ROUNDING = 1e-5  # of |w| |x|, what products and sums in float32 lose at most, for rows of up to thousands of numbers
MOST = 0.25  # of the vocabulary, which a batch may need logits of; for more tokens, all logits are computed


class Screen:
    """Finds the most probable tokens of a projection to a vocabulary, weight (V, d_model) and bias (V,), in float32."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None, in_8_bits: Int8Linear, exactly: Callable[[], Linear]
    ) -> None:
        self.weight, self.bias, self.in_8_bits, self.exactly = weight, bias, in_8_bits, exactly
        integers, step = rounded_weight(weight)
        self.kept = float((integers.float().norm(dim=1) * step).max())
        self.lost = float(torch.addcmul(weight, integers, step[:, None], value=-1).norm(dim=1).max())

    def __call__(self, x: Tensor, bar: Bar | None = None) -> Tensor:
        """Returns the most probable token of each row of x, (rows, d_model): the first one of equal logits.

        `bar` fills the scores of tokens that may not be chosen with -inf, in a tensor (rows, V).
        """
        units, largest = scaled(x)
        kept = (units * HIGHEST).round_().mul_(largest / HIGHEST)
        length, lost = (one.norm(dim=1, keepdim=True) for one in (x, x - kept))
        bound = (self.lost + ROUNDING * self.kept) * length + self.kept * lost  # (rows, 1)
        scores = self.in_8_bits.of_scaled(units, largest)
        if bar is not None:
            scores = bar(scores)
        scores.sub_(scores.amax(dim=1, keepdim=True) - 2 * bound)
        tokens = (scores.amax(dim=0) >= 0).nonzero().flatten()  # that may be the best of a row
        if not 0 < len(tokens) <= MOST * len(self.weight):  # none: scores are nan
            logits = self.exactly()(x)
            return (logits if bar is None else bar(logits)).argmax(dim=1)
        logits = F.linear(x, self.weight[tokens], None if self.bias is None else self.bias[tokens])
        if bar is not None:
            logits.masked_fill_(scores[:, tokens].isneginf(), -torch.inf)
        return tokens[logits.argmax(dim=1)]
