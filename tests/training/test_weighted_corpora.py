"""Several corpora with weights: what share of the pairs each has, and resuming."""

import json
import re
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest
import torch
from datasets import Dataset, IterableDataset
from datasets.distributed import split_dataset_by_node
from safetensors.torch import load_file

from hf_vanilla_transformer.data.corpora import CorpusError, counts_per_epoch, mixed

# ---- The mixture ----
SIZES, WEIGHTS = (30, 50, 8), (1.0, 1.0, 2.0)


def corpora_of(sizes, kind=Dataset):
    def pairs(name, size):
        yield from ({"source": f"{name}{number}", "target": "x"} for number in range(size))

    return [
        kind.from_generator(pairs, gen_kwargs={"name": "abc"[place], "size": size}) for place, size in enumerate(sizes)
    ]


def counted(rows):
    return Counter(row["source"] for row in rows)


def test_an_epoch_has_the_shares_of_the_weights_and_every_pair():
    assert counts_per_epoch(SIZES, WEIGHTS) == [50, 50, 100]
    assert counts_per_epoch([29_000, 29_000], [1, 2.4]) == [29_000, 69_600]
    assert counts_per_epoch([7], [0.1]) == [7]
    first, same, other = (counted(mixed(corpora_of(SIZES), WEIGHTS, seed)) for seed in (1, 1, 2))
    assert Counter(name[0] for name in first.elements()) == {"a": 50, "b": 50, "c": 100}
    times = {letter: {count for name, count in first.items() if name[0] == letter} for letter in "abc"}
    assert times == {"a": {1, 2}, "b": {1}, "c": {12, 13}}  # complete copies, and some once more
    assert len(first) == sum(SIZES)
    assert first == same != other


@pytest.mark.parametrize("weights", [(1.0, 1.0, 1e-9), (1e-320, 1.0, 1.0)])
def test_weights_that_would_fill_the_memory_are_refused(weights):
    with pytest.raises(CorpusError, match=r"pairs, but the corpora have 88; .*: give numbers that differ less"):
        mixed(corpora_of(SIZES), weights, 1)


def test_a_stream_draws_by_the_weights_until_all_corpora_have_ended():
    first, same, other = (
        [row["source"] for row in mixed(corpora_of(SIZES, IterableDataset), WEIGHTS, seed)] for seed in (1, 1, 2)
    )
    assert first == same != other
    assert len(set(first)) == sum(SIZES)
    shares = Counter(name[0] for name in first)
    assert shares["c"] / len(first) == pytest.approx(0.5, abs=0.1)
    stream = mixed(corpora_of(SIZES, IterableDataset), WEIGHTS, 1)
    halves = [[row["source"] for row in split_dataset_by_node(stream, rank, 2)] for rank in range(2)]
    assert [halves[place % 2][place // 2] for place in range(len(first))] == first
    stream = stream.shuffle(seed=0, buffer_size=10)
    stream.set_epoch(1)
    assert [row["source"] for row in islice(stream, 40)] != first[:40]  # each pass draws anew


# ---- Runs ----
MAP = {"per_device_train_batch_tokens": 64}
STREAM = {**MAP, "streaming": True, "shuffle_buffer_size": 20, "max_length": 60, "dataloader_num_workers": 1}
SHARES = "train.en + train.de, weight 1: 33.3% of pairs read; other.en + other.de, weight 2: 66.7% of pairs read"


@pytest.fixture
def weighted(recipe):
    """A recipe with two corpora: 50 pairs, and 20 others with double weight, of which two are left out."""
    folder = Path(recipe["data_dir"])
    for side, word in (("en", "seven"), ("de", "sieben")):
        (folder / f"other.{side}").write_text("".join(f"{word} {number}\n" for number in range(18)) + "\n\n")
    corpora = {
        "train_source": ["train.en", {"path": "other.en", "weight": 2}],
        "train_target": ["train.de", "other.de"],
    }
    return (
        recipe | corpora | {"average_last": 0, "test_source": [], "test_target": [], "max_steps": 24, "save_steps": 9}
    )


@pytest.mark.parametrize("kind", [MAP, STREAM], ids=["files", "stream"])
def test_a_resumed_run_trains_on_the_same_mixture(train, weighted, seen, kind):
    result = train(weighted | kind)
    assert result.code == 0, result.err
    assert (f"Mixture: {SHARES}\n" in result.out) == (kind is STREAM)
    at_once, run = list(seen), Path(weighted["output_dir"])
    seen.clear()
    again = weighted | kind | {"output_dir": f"{run}-again"}
    assert train(again, "--max-steps", "9").code == 0
    before = len(seen)
    assert train(again, "--resume").code == 0
    assert 0 < before < len(at_once)
    assert seen == at_once
    one, other = (load_file(Path(name, "model.safetensors")) for name in (run, f"{run}-again"))
    assert all(torch.equal(one[name], other[name]) for name in one)
    share = sum(target.startswith("sieben") for target in at_once) / len(at_once)
    assert share == pytest.approx(2 / 3, abs=0.08)


def test_the_log_the_card_and_the_folder_know_the_weights(train, weighted, seen):
    weighted |= MAP
    mixture = (
        "train.en + train.de, weight 1: 50 pairs, 50 per epoch; other.en + other.de, weight 2: 18 pairs, 100 per epoch"
    )
    dry = train(weighted, "--dry-run")
    assert dry.code == 0, dry.err
    assert f"\nMixture: {mixture}\n" in dry.out
    seen.clear()
    result = train(weighted)
    assert f"\nMixture: {mixture}\n" in result.out
    assert "Training data: 68 pairs kept, 2 left out: 2 with an empty side" in result.out
    batches = int(re.search(r"Batches: (\d+) per epoch", result.out)[1])
    assert batches <= 24  # so that a complete epoch was seen
    run = Path(weighted["output_dir"])
    card, facts = (run / "README.md").read_text(), json.loads((run / "model_card.json").read_text())
    assert f"| mixture of corpora | {mixture} |" in card
    assert "- 68 sentence pairs" in card
    assert (facts["training_pairs"], facts["recipe"]["mixture"]) == (68, mixture)
    for weight in (3, 1):
        corpora = {"train_source": ["train.en", f"other.en={weight}"]}
        refused = train(weighted | corpora, "--resume", "--max-steps", "30")
        assert refused.code == 2
        assert f"was started with train_weights [1.0, 2.0], not [1.0, {weight}.0]" in refused.error


def test_weights_cannot_be_added_to_a_run_without(train, weighted):
    plain = weighted | MAP | {"train_source": ["train.en", "other.en"], "max_steps": 2}
    assert train(plain).code == 0
    record = Path(plain["output_dir"], "recipe.json")
    record.write_text(
        json.dumps({name: one for name, one in json.loads(record.read_text()).items() if "weights" not in name})
    )
    refused = train(weighted | MAP, "--resume")  # of a version before weights
    assert "was started with train_weights [], not [1.0, 2.0]" in refused.error
    assert train(plain, "--resume", "--max-steps", "4").code == 0
