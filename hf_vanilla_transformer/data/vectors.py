"""Pretrained word vectors in the text formats of Word2Vec and GloVe."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from .formats import CorpusError, check_file, read_lines


def read_vectors(file: str, size: int) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Yields the words of a file, each with its vector (size,); a wrong line is a `CorpusError` that names it.

    A line is a word and its numbers, separated by spaces. Word2Vec's first line is the number of words and the size.
    """
    check_file(Path(file))
    for number, line in enumerate(read_lines(file), start=1):
        cells = line.rstrip().split(" ")
        if number == 1 and len(cells) == 2 and size > 1 and cells[0].isdecimal():  # Word2Vec's
            continue
        if len(cells) <= size or (number < 3 and len(cells) != size + 1):  # GloVe's words may contain spaces
            raise CorpusError(f"{file}:{number}: a word and {len(cells) - 1} numbers, but d_model is {size}")
        try:
            vector = np.array(cells[-size:], dtype=np.float32)
        except ValueError as error:
            raise CorpusError(f"{file}:{number}: not a word and {size} numbers ({error})") from error
        if not np.isfinite(vector).all():
            raise CorpusError(f"{file}:{number}: a number isn't finite, or too large for float32")
        yield " ".join(cells[:-size]), vector


def use_vectors(
    file: str, tokenizer: PreTrainedTokenizerBase, weight: torch.Tensor, scale: float, *, is_target: bool = False
) -> int:
    """Writes pretrained vectors into embeddings, (vocab_size, d_model), that a model multiplies by `scale`.

    A token gets the vector of the word that it spells, with a space before it or without. `is_target`: the rows are
    those of the target's vocabulary, where the tokenizer has two. Returns how many tokens have a vector.
    """
    tokens_of: dict[str, list[int]] = {}
    separate = getattr(tokenizer, "separate_vocabs", False)
    for token, id_ in (tokenizer.target_encoder if separate and is_target else tokenizer.get_vocab()).items():
        if separate and not is_target:  # convert_tokens_to_string spells the target's
            word = tokenizer.decode([id_], use_source_tokenizer=True, clean_up_tokenization_spaces=False)
        else:
            word = tokenizer.convert_tokens_to_string([token])
        tokens_of.setdefault(word.strip(), []).append(id_)
    found: set[int] = set()
    for word, vector in read_vectors(file, weight.shape[1]):
        for id_ in tokens_of.pop(word, ()):  # the first vector of a word counts
            weight.data[id_] = torch.from_numpy(vector / scale)
            found.add(id_)
    return len(found)
