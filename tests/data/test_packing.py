"""Packed batches have every pair once an epoch in rows of one shape, with little filler."""

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_batching import LENGTHS, assert_shared, sampler_of, some_lengths

from hf_vanilla_transformer import VanillaTransformerConfig
from hf_vanilla_transformer.data.batching import BatchingError
from hf_vanilla_transformer.data.packing import PackedBatchSampler, PackingCollator

CONFIG = VanillaTransformerConfig(vocab_size=50, pad_token_id=0, decoder_start_token_id=1)
PACKED = partial(PackedBatchSampler, row_tokens=50)


def pairs_of(lengths, batch):
    """Pairs whose tokens all are the pair's number + 2."""
    return [{"input_ids": [n + 2] * lengths[n][0], "labels": [n + 2] * lengths[n][1]} for n in batch]


@given(LENGTHS, st.integers(30, 200), st.integers(30, 60), st.integers(0, 3))
def test_every_pair_is_in_one_batch_and_every_batch_fits_its_rows(lengths, max_tokens, row_tokens, epoch):
    sampler = sampler_of(lengths, max_tokens, epoch, kind=partial(PackedBatchSampler, row_tokens=row_tokens))
    rows, *widths = sampler.shape
    assert rows * max(widths) <= max_tokens
    batches = [batch for _ in range(2) for batch in sampler][: len(sampler)]
    assert sorted(pair for batch in batches for pair in batch) == list(range(len(lengths)))
    collator, filler = PackingCollator(CONFIG, sampler.shape), 0
    for batch in batches:
        packed = collator(pairs_of(lengths, batch))
        assert packed["input_ids"].shape == packed["encoder_attention_mask"].shape == (rows, widths[0])
        assert packed["labels"].shape == packed["decoder_attention_mask"].shape == (rows, widths[1])
        for ids, numbers in (("input_ids", "encoder_attention_mask"), ("labels", "decoder_attention_mask")):
            is_real = packed[numbers] > 0
            filler += (~is_real).sum().item()
            assert torch.equal(is_real, packed[ids] > 1)
    assert sampler.padding_waste == pytest.approx(filler / (len(batches) * rows * sum(widths)))


@given(LENGTHS, st.integers(1, 4), st.integers(1, 3), st.integers(0, 3))
def test_processes_share_the_batches(lengths, num_processes, accumulation_steps, epoch):
    samplers, _ = assert_shared(PACKED, lengths, epoch, num_processes, accumulation_steps)
    for sampler in samplers:
        assert sampler.shape == samplers[0].shape
        for batch in sampler:
            PackingCollator(CONFIG, sampler.shape)(pairs_of(lengths, batch))  # all pairs fit


def test_little_is_filler_and_epochs_differ():
    lengths = some_lengths(20_000)
    lengths[:, 0] = (lengths[:, 0] * 0.7).clip(1)
    sampler = sampler_of(lengths, 8192, kind=PackedBatchSampler)
    assert sampler.padding_waste < 0.02
    assert sampler.shape[1] < 0.75 * sampler.shape[2] == 0.75 * 1024
    first = list(sampler)
    assert list(sampler) == first
    sampler.set_epoch(1)
    second = list(sampler)
    assert len(second) == len(first)
    partners = [{pair: others for others in map(set, epoch) for pair in others} for epoch in (first, second)]
    kept = np.mean([len(partners[0][n] & partners[1][n]) / len(partners[0][n]) for n in range(0, 20_000, 100)])
    assert kept < 2 / len(first)


def test_rows_are_numbered_shifted_and_filled():
    pairs = [
        {"input_ids": [5, 6, 2], "labels": [7, 2]},
        {"input_ids": [2], "labels": [-100, 8, 9, 2]},
        {"input_ids": [5, 2], "labels": [2]},
    ]
    packed = PackingCollator(CONFIG, (3, 5, 6))(pairs)
    assert {name: tensor.tolist() for name, tensor in packed.items()} == {
        "input_ids": [[5, 6, 2, 2, 0], [5, 2, 0, 0, 0], [0] * 5],
        "encoder_attention_mask": [[1, 1, 1, 2, 0], [1, 1, 0, 0, 0], [0] * 5],
        "decoder_input_ids": [[1, 7, 1, 0, 8, 9], [1, 0, 0, 0, 0, 0], [0] * 6],
        "decoder_attention_mask": [[1, 1, 2, 2, 2, 2], [1, 0, 0, 0, 0, 0], [0] * 6],
        "labels": [[7, 2, -100, 8, 9, 2], [2, *[-100] * 5], [-100] * 6],
    }
    assert all(tensor.dtype == torch.int64 for tensor in packed.values())


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([(3, 4), (2, 61)], "have 4 to 61 tokens, but a packed row takes 1 to 60; .*`max_length`"),
        ([(3, 4), (0, 2)], "have 0 to 3 tokens, but a packed row takes 1"),
        ([(3, 4)], "1 sentence pairs are too few for 1 processes with 2 batches each"),
    ],
)
def test_what_does_not_fit_is_refused(lengths, message):
    with pytest.raises(BatchingError, match=message):
        sampler_of(lengths, 60, kind=PackedBatchSampler, accumulation_steps=2)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((2, 5, 5), "2 pairs don't fit into 2 rows of 5 source"),
        ((1, 6, 9), "more or longer rows"),
        ((9, 9, 9), "empty"),
    ],
)
def test_collators_refuse_what_they_would_cut(shape, message):
    pairs = pairs_of([(6, 2), (3, 2), (0, 1)], [0, 1, 2] if message == "empty" else [0, 1])
    with pytest.raises(BatchingError, match=message):
        PackingCollator(CONFIG, shape)(pairs)
