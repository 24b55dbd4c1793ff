"""Batches hold every sentence once an epoch within the budget; all processes and resumed runs agree on them."""

from collections import Counter
from itertools import islice, pairwise

import datasets
import numpy as np
import pytest
from datasets.distributed import split_dataset_by_node
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from hf_vanilla_transformer.data.batching import TokenBudgetBatchSampler, TokenBudgetStream

LENGTHS = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=80)


def sampler_of(lengths, max_tokens, epoch=0, kind=TokenBudgetBatchSampler, **options):
    source, target = np.array(lengths).T
    sampler = kind(source, target, max_tokens, **options)
    sampler.set_epoch(epoch)
    return sampler


def some_lengths(number=2000, longest=60):
    """Lengths as translations have them: a skewed source length, and a target length about as long."""
    random = np.random.default_rng(0)
    source = random.poisson(random.gamma(6, 2.5, number)).clip(1, longest)
    return np.stack([source, (source + random.integers(-3, 4, number)).clip(1, longest)], axis=1)


def padded(batch, lengths):
    """Tokens of a batch on the source and on the target side, padding included."""
    return len(batch) * np.array(lengths)[batch].max(axis=0)


def waste(sampler, lengths):
    """The part of the batches' tokens that is padding, counted over the batches themselves."""
    return 1 - np.sum(lengths) / sum(padded(batch, lengths).sum() for batch in sampler)


# One epoch


@given(LENGTHS, st.integers(30, 200), st.integers(0, 5), st.sampled_from([0.0, 0.25, 1.0]))
def test_every_sentence_is_in_one_batch_and_no_batch_exceeds_the_budget(lengths, max_tokens, epoch, tolerance):
    sampler = sampler_of(lengths, max_tokens, epoch, length_tolerance=tolerance)
    batches = list(sampler)
    assert len(batches) == len(sampler)
    assert sorted(place for batch in batches for place in batch) == list(range(len(lengths)))
    assert all(padded(batch, lengths).max() <= max_tokens for batch in batches)
    assert epoch or sampler.padding_waste == pytest.approx(waste(sampler, lengths))


def assert_shared(kind, lengths, epoch, num_processes, accumulation_steps):
    """The samplers of some processes, and the batches of each: they have equally many and every sentence once."""
    assume(len(lengths) >= 2 * num_processes * accumulation_steps)
    max_tokens = 200  # six sentences or more, so that there are enough of them for any number of batches here
    samplers = samplers_of(lengths, max_tokens, epoch, num_processes, accumulation_steps, kind=kind)
    shares = [list(sampler) for sampler in samplers]
    assert {len(share) for share in shares} == {len(samplers[0])}
    assert len(shares[0]) % accumulation_steps == 0
    batches = [batch for share in shares for batch in share]
    assert all(batches), "an empty batch"
    assert sorted(place for batch in batches for place in batch) == list(range(len(lengths)))
    return samplers, batches


@given(LENGTHS, st.integers(1, 4), st.integers(1, 3), st.integers(0, 3))
def test_processes_share_the_batches(lengths, num_processes, accumulation_steps, epoch):
    _, batches = assert_shared(TokenBudgetBatchSampler, lengths, epoch, num_processes, accumulation_steps)
    assert all(padded(batch, lengths).max() <= 200 for batch in batches)


def test_little_is_padded_and_rounded_lengths_mix_them():
    lengths = some_lengths(20_000)
    exact, rounded = (sampler_of(lengths, 4096, epoch=3, length_tolerance=tolerance) for tolerance in (0.0, 0.25))
    spans = [np.median([np.ptp(lengths[batch], axis=0) for batch in one], axis=0) for one in (exact, rounded)]
    assert np.all(spans[1] > spans[0])
    at_random = np.array_split(np.arange(len(lengths)), len(exact))
    assert waste(exact, lengths) < 0.05 < waste(rounded, lengths) < 0.1 < 0.3 < waste(at_random, lengths)


# Several epochs


def test_the_same_seed_and_epoch_give_the_same_batches():
    lengths = some_lengths()
    sampler = sampler_of(lengths, 500, seed=3)
    for epoch in (0, 1, 7):
        sampler.set_epoch(epoch)  # as in a run that is resumed
        assert list(sampler) == list(sampler)  # an epoch lasts until the next is set
        assert list(sampler) == list(sampler_of(lengths, 500, epoch, seed=3))
        assert list(sampler) != list(sampler_of(lengths, 500, epoch, seed=4))


def test_epochs_have_other_orders_and_other_batches():
    lengths = some_lengths()
    epochs = [list(sampler_of(lengths, 500, epoch)) for epoch in range(4)]
    for one, other in pairwise(epochs):
        # Neither the lengths' order nor who is with whom stays, though sentences of equal lengths alone change places.
        sizes = [[padded(batch, lengths).tolist() for batch in epoch] for epoch in (one, other)]
        assert sizes[0] != sizes[1]
        assert len({frozenset(batch) for batch in one} & {frozenset(batch) for batch in other}) < len(one) / 2
        widths = [padded(batch, lengths).max() // len(batch) for batch in one]
        assert abs(np.corrcoef(widths, range(len(widths)))[0, 1]) < 0.3  # long and short batches come mixed


# Several processes


def samplers_of(lengths, max_tokens, epoch, num_processes, accumulation_steps, **options):
    """The sampler of each process."""
    options |= {"num_processes": num_processes, "accumulation_steps": accumulation_steps}
    return [sampler_of(lengths, max_tokens, epoch, process_index=n, **options) for n in range(num_processes)]


def plan(*arguments):
    """The batches of each update, as sets of sentences, whichever process has them."""
    shares, steps = [list(sampler) for sampler in samplers_of(*arguments)], arguments[-1]
    return [
        sorted(sorted(batch) for share in shares for batch in share[update : update + steps])
        for update in range(0, len(shares[0]), steps)
    ]


def test_updates_depend_on_the_product_of_processes_and_accumulation_alone():
    lengths = some_lengths()
    for epoch in (0, 1):
        one = plan(lengths, 500, epoch, 1, 12)
        assert all(len(update) == 12 for update in one)
        for num_processes, accumulation_steps in ((2, 6), (3, 4), (4, 3), (12, 1)):
            assert plan(lengths, 500, epoch, num_processes, accumulation_steps) == one
    assert len(plan(lengths, 500, 0, 1, 1)) != 12 * len(one)  # twelve did need batches to be split


# What is wrong


def test_a_sentence_longer_than_the_budget():
    for lengths in ([(3, 9), (2, 2)], [(9, 3), (2, 2)]):
        message = r"a sentence of 9 tokens is longer than a batch of 8 tokens; raise .*leave out long sentences"
        with pytest.raises(ValueError, match=message):
            sampler_of(lengths, 8)
        assert len(sampler_of(lengths, 9)) == 2


# Of the latter, each is a batch of its own: five can't be halved.
@pytest.mark.parametrize(("sentences", "num_processes", "max_tokens"), [(3, 4, 100), (5, 2, 4)])
def test_too_few_sentences(sentences, num_processes, max_tokens):
    message = f"{sentences} sentence pairs are too few for {num_processes} processes with 1 batches each per update"
    with pytest.raises(ValueError, match=message):
        sampler_of([(4, 4)] * sentences, max_tokens, num_processes=num_processes)


# Streams


def examples(files):
    """A data set of several files: (name, number of examples)."""
    for name, number in files:
        for place in range(number):
            yield {"input_ids": [100 * name + place] * (1 + place % 5), "labels": [0] * (1 + place % 7)}


def stream_of(*files, max_tokens=40, window=20, seed=0, rank=0, world_size=1):
    dataset = datasets.IterableDataset.from_generator(examples, gen_kwargs={"files": list(enumerate(files, start=1))})
    own = split_dataset_by_node(dataset, rank, world_size).shuffle(seed=seed, buffer_size=window)
    return TokenBudgetStream(own, max_tokens, window, seed=seed)


def names(batch):
    return [example["input_ids"][0] for example in batch]


def everything(*files):
    return sorted(100 * name + place for name, number in enumerate(files, start=1) for place in range(number))


def passes(batches, number, count, max_tokens=40):
    """The names of `count` passes over `number` examples; batches end where passes do, and keep to the budget."""
    batches, result = iter(batches), []
    for _ in range(count):
        seen = []
        while len(seen) < number:
            batch = next(batches)
            assert len(batch) * max(len(ids) for example in batch for ids in example.values()) <= max_tokens
            seen += names(batch)
        result.append(seen)
    return result


@pytest.mark.parametrize("window", [1, 20])
def test_a_stream_gives_every_example_once_a_pass_and_never_ends(window):
    first, *others = passes(stream_of(33, 20, window=window), 53, 5)
    assert sorted(first) == everything(33, 20)
    for other in others:
        assert sorted(other) == sorted(first)
        assert other != first or window == 1  # which only the files' order can change


def test_a_stream_has_full_batches_of_like_sentences():
    batches = list(islice(stream_of(90, 90, max_tokens=60, window=90), 24))
    assert np.mean([len(batch) for batch in batches]) > 8
    lengths = [len(example["labels"]) for batch in batches for example in batch]
    spread = np.mean([np.std([len(example["labels"]) for example in batch]) for batch in batches])
    assert spread < np.std(lengths) / 3


def test_a_stream_is_fixed_by_its_seed():
    one, same, other = ([names(batch) for batch in islice(stream_of(33, 20, seed=seed), 40)] for seed in (1, 1, 2))
    assert one == same != other
    stream = stream_of(33, seed=1)
    assert [names(batch) for batch in islice(stream, 9)] == [names(batch) for batch in islice(stream, 9)]


@pytest.mark.parametrize("files", [(50,), (25, 25), (9, 30, 14)])
def test_processes_share_a_stream(files):
    streams = [stream_of(*files, rank=rank, world_size=2) for rank in range(2)]
    if len(files) < 3:  # each reads half of it, so that their passes are disjoint
        for one, other in zip(*(passes(stream, 25, 3) for stream in streams), strict=True):
            assert sorted(one + other) == everything(*files)
        return
    loaders = [DataLoader(stream, batch_size=None, num_workers=2, collate_fn=list) for stream in streams]
    counts = Counter(name for loader in loaders for batch in islice(loader, 60) for name in names(batch))
    assert sorted(counts) == everything(*files)
    # Whoever has the shorter file begins anew earlier, so that they are not in the same pass.
    assert max(counts.values()) <= 2 * min(counts.values())


@pytest.mark.parametrize("files", [(50,), (25, 25)])
def test_the_passes_of_workers_are_disjoint(files):
    loader = DataLoader(stream_of(*files), batch_size=None, num_workers=2, collate_fn=list)
    batches = list(islice(loader, 120))
    if files == (50,):  # which one worker reads
        for one in passes(batches, 50, 5):
            assert sorted(one) == everything(*files)
    else:  # the workers' batches come by turns
        for one, other in zip(passes(batches[0::2], 25, 5), passes(batches[1::2], 25, 5), strict=True):
            assert sorted(one + other) == everything(*files)


def test_a_stream_without_an_example():
    with pytest.raises(ValueError, match="the stream has no sentence pair for this process; were all of them left out"):
        next(iter(stream_of(0)))
    with pytest.raises(ValueError, match="has no sentence pair"):
        next(iter(DataLoader(stream_of(0, 0), batch_size=None, num_workers=2, collate_fn=list)))
