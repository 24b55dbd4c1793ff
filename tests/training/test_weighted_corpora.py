"""Several corpora with weights: how they are given, what share of the pairs each has, and resuming."""

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

from hf_vanilla_transformer import VanillaTransformerForConditionalGeneration
from hf_vanilla_transformer.data.corpora import counts_per_epoch, mixed
from hf_vanilla_transformer.training.options import RecipeError
from hf_vanilla_transformer.training.recipe import options_of, parse_recipe
from hf_vanilla_transformer.training.trainer import VanillaTransformerTrainer

WEIGHTED = "train_data: [a.tsv, {path: b.tsv, weight: 2.5}, user/set=3]\ntrain_source: [c.en=4]\ntrain_target: [c.de]"


# ---- Options ----
@pytest.fixture
def recipe_of(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def parse(text, *words):
        Path("recipe.yaml").write_text(text)
        return parse_recipe(["recipe.yaml"], options_of(words))[0]

    return parse


def test_weights_are_given_in_recipes_and_on_the_command_line(recipe_of):
    data = recipe_of(WEIGHTED)
    assert (data.train_source, data.train_data) == (["c.en"], ["a.tsv", "b.tsv", "user/set"])
    assert data.train_weights == [4.0, 1.0, 2.5, 3.0]  # in the order in which corpora are read
    data = recipe_of(WEIGHTED, "--train-data", "x.tsv", "y.tsv=1e-1")
    assert (data.train_data, data.train_weights) == (["x.tsv", "y.tsv"], [4.0, 1.0, 0.1])
    assert recipe_of("train_data: [a.tsv, b.tsv]").train_weights == []
    assert recipe_of("train_source: [a.tsv=2, b.tsv]").train_weights == [2.0, 1.0]  # tables have both sides
    Path("a=2").touch()  # files may have such names
    data = recipe_of("train_source: [a=2, b=2, c=d]\ntrain_target: [x, y, z]")
    assert (data.train_source, data.train_weights) == (["a=2", "b", "c=d"], [1.0, 2.0, 1.0])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train_data: [a.tsv=2]", "a weight has no effect on a single corpus; leave it out"),
        ("train_data: [a.tsv=0, b.tsv]", "weights of training data are 0, 1; give numbers above 0"),
        ("train_data: [a.tsv, {path: b.tsv, weight: -1}]", "weights of training data are 1, -1; give numbers"),
        ("train_data: [a.tsv=nan, b.tsv=inf]", "weights of training data are nan, inf; give numbers above 0"),
        ("train_data: [a.tsv, {path: b.tsv, weight: heavy}]", "a list of strings, or of mappings {path: NAME, weight:"),
        ("train_data: [a.tsv, {file: b.tsv, weight: 2}]", "a list of strings, or of mappings {path: NAME, weight:"),
        ("validation_data: [{path: b.tsv, weight: 2}]", "give a list of strings"),
    ],
)
def test_wrong_weights_are_named(recipe_of, text, message):
    with pytest.raises(RecipeError, match=re.escape(message)):
        recipe_of(text)


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
STREAM = {**MAP, "streaming": True, "shuffle_buffer_size": 20, "max_length": 60}


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


@pytest.fixture
def seen(monkeypatch):
    """The targets that are trained on, in their order."""
    seen, step = [], VanillaTransformerTrainer.training_step

    def noted(self, model, inputs, *args, **kwargs):
        seen.extend(self.processing_class.decode(row[row >= 0], skip_special_tokens=True) for row in inputs["labels"])
        return step(self, model, inputs, *args, **kwargs)

    monkeypatch.setattr(VanillaTransformerTrainer, "training_step", noted)
    return seen


@pytest.mark.parametrize("kind", [MAP, STREAM], ids=["files", "stream"])
def test_a_resumed_run_trains_on_the_same_mixture(train, weighted, seen, kind):
    result = train(weighted | kind)
    assert result.code == 0, result.err
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


def test_a_stream_tells_its_shares(train, weighted):
    options = {"max_steps": 2, "train_source": ["train.en=1", "other.en=3"], "dataloader_num_workers": 1}
    result = train(weighted | STREAM | options)
    assert result.code == 0, result.err
    shares = "train.en + train.de, weight 1: 25.0% of the pairs; other.en + other.de, weight 3: 75.0% of the pairs"
    assert f"Mixture: {shares}\n" in result.out


# ---- The students' recipes ----
def test_the_students_are_small():
    students = (["multi30k_tiny", "multi30k_student"], ["multi30k_tiny", "multi30k_student", "multi30k_student_tiny"])
    for names, most, layers in zip(students, (3_700_000, 1_300_000), ((6, 2), (4, 1)), strict=True):
        data, model, _ = parse_recipe(names, {"output_dir": "x"})
        config = model.config(model.vocab_size)
        with torch.device("meta"):
            parameters = VanillaTransformerForConditionalGeneration(config).num_parameters()
        assert parameters <= most
        assert (config.encoder_layers, config.decoder_layers) == layers
        assert data.train_target == ["train.de", "distilled.de"]
