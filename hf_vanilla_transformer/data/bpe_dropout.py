"""BPE-dropout (Provilkov et al. 2020, arXiv:1910.13267): a text in other pieces each time it is seen.

The dropout that the tokenizers library has itself can't be seeded, so that no run could be repeated or gone on with.
It also skips less than algorithm 1 of the paper, which is what stands here: at 0.1, Multi30k's English side in pieces
of a vocabulary of 5,000 gets 1.15 times as many, and by the paper's algorithm 1.26 times as many.
"""

import json
from collections.abc import Iterable, Sequence
from itertools import pairwise
from random import Random
from typing import Any

from ..tokenization_vanilla_transformer import VanillaTransformerTokenizerFast


class BPEDropout:
    """Tokenizes with a merge skipped now and then; the same seed gives the same pieces.

    Args:
        tokenizer: Whose pieces and merges are used; control tokens and added tokens stay whole.
        probability: To skip a merge that could be made, in [0, 1]: at 0 the tokenizer's own pieces, at 1 bytes. The
            authors' value is 0.1.

    Raises:
        ValueError: Another kind of tokenizer, a probability out of range.
    """

    def __init__(self, tokenizer: Any, probability: float) -> None:
        if not isinstance(tokenizer, VanillaTransformerTokenizerFast):
            raise ValueError(
                "BPE-dropout needs the merges of a VanillaTransformerTokenizerFast, and the tokenizer is a "
                f"{type(tokenizer).__module__}.{type(tokenizer).__name__}; leave bpe_dropout out, or load one of ours "
                "without trust_remote_code"
            )
        if not isinstance(probability, (int, float)) or not 0 <= probability <= 1:
            raise ValueError(f"bpe_dropout is {probability!r}; give a probability from 0 to 1 (the authors': 0.1)")
        self.tokenizer, self.probability = tokenizer, probability
        model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
        self._ids: dict[str, int] = model["vocab"]
        # A pair of neighbours -> its rank, which says what is merged first, and what the two become.
        self._merges = {
            (self._ids[left], self._ids[right]): (rank, self._ids[left + right])
            for rank, (left, right) in enumerate(model["merges"])
        }

    def encode(self, texts: Sequence[str], seeds: Iterable[int | str]) -> list[list[int]]:
        """Returns each text's token ids, which the seed of the same place decides."""
        encodings = self.tokenizer(list(texts), verbose=False).encodings if texts else []
        return [self._vary(encoding, Random(seed)) for encoding, seed in zip(encodings, seeds, strict=True)]

    def _vary(self, encoding: Any, random: Random) -> list[int]:
        ids: list[int] = []
        word, number = "", None
        added = self.tokenizer.added_tokens_decoder
        for piece, id_, own in zip(encoding.tokens, encoding.ids, encoding.word_ids, strict=True):
            if own != number or id_ in added:
                ids += self._pieces(word, random)
                word, number = "", own
            if id_ in added:
                ids.append(id_)
            else:
                word += piece
        return ids + self._pieces(word, random)

    def _pieces(self, word: str, random: Random) -> list[int]:
        """Algorithm 1: makes the first of the possible merges that aren't dropped, until none is left.

        Whether a merge behind the first one would have been dropped doesn't matter, so it isn't drawn.
        """
        pieces = [self._ids[letter] for letter in word]
        while True:
            first, place = None, 0
            for here, pair in enumerate(pairwise(pieces)):
                merge = self._merges.get(pair)
                if merge is None or (first is not None and merge >= first):
                    continue
                if random.random() >= self.probability:
                    first, place = merge, here
            if first is None:
                return pieces
            pieces[place : place + 2] = [first[1]]


__all__ = ["BPEDropout"]
