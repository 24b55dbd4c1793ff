"""Many sentences through one model or an ensemble, against one at a time and plain beam search."""

from types import SimpleNamespace

import pytest
import torch
from random_models import TEXTS, new_model
from transformers import GenerationConfig
from transformers.utils import ModelOutput

from hf_vanilla_transformer import engine
from hf_vanilla_transformer.engine.decoding import linear
from hf_vanilla_transformer.translation.backend import Translation, batches
from hf_vanilla_transformer.translation.ensembles import ensemble
from hf_vanilla_transformer.translation.scoring import score_targets
from hf_vanilla_transformer.translation.translator import Translator
from tests.decoding import decode

GREEDY = {"num_beams": 1, "early_stopping": False}


@pytest.fixture(scope="module")
def model(tokenizer):
    return new_model(len(tokenizer), seed=3)


@pytest.fixture(scope="module")
def other(tokenizer):
    """Of another size than `model`."""
    return new_model(len(tokenizer), seed=2, d_model=24)


# ---- Decoding ----
def test_samples_have_no_scores(model, tokenizer):
    (row,) = decode(model, tokenizer, ["nine"], do_sample=True, max_new_tokens=4, **GREEDY)
    assert [one.score for one in row] == [None]


def test_n_best_lists_are_generates_own_sorted_by_score(model, tokenizer, monkeypatch):
    options = {"num_beams": 4, "max_new_tokens": 6}
    calls, generate = [], model.generate
    with monkeypatch.context() as patch:
        patch.setattr(model, "generate", lambda **inputs: calls.append(1) or generate(**inputs))
        found = decode(model, tokenizer, TEXTS, n_best=2, batch_size=2, **options)
    assert len(calls) == 3  # batches of the five texts: none is decoded again for its scores
    for sentence, row in zip(TEXTS, found, strict=True):
        if not sentence:
            assert row == [Translation("", 0, 0.0)]
            continue
        output = model.generate(
            **tokenizer([sentence], return_tensors="pt"),
            num_return_sequences=2, output_scores=True, return_dict_in_generate=True, **options,
        )  # fmt: skip
        assert [one.score for one in row] == pytest.approx(output.sequences_scores.tolist(), abs=1e-5)
        assert [one.score for one in row] == sorted((one.score for one in row), reverse=True)
        assert row[0].text == tokenizer.decode(output.sequences[0], skip_special_tokens=True).replace("\n", " ")
        assert len({one.text for one in row}) == 2
    given = GenerationConfig(max_new_tokens=6)  # which names no beams: they are the model's
    assert decode(model, tokenizer, TEXTS, n_best=2, generation_config=given) == decode(
        model, tokenizer, TEXTS, n_best=2, max_new_tokens=6
    )


def test_a_translation_is_one_line_and_its_length_counts_up_to_the_end(model, tokenizer, monkeypatch):
    text = tokenizer("one\ntwo\r\nthree")["input_ids"]
    rows = [[1, *text, 0, 0], [1, *text[:3], 2, *text[3:], 0]]  # the second ends early, whatever comes behind
    output = ModelOutput(sequences=torch.tensor(rows))
    monkeypatch.setattr(model, "generate", lambda **options: output)
    first, second = (row[0] for row in decode(model, tokenizer, ["b", "a"]))
    assert (first.text, first.num_tokens) == ("one two  three", len(text))
    assert second.num_tokens == 4
    monkeypatch.setattr(model.generation_config, "pad_token_id", None)
    assert decode(model, tokenizer, ["a"])[0][0].num_tokens == len(text)


def test_batches_hold_every_sentence_once_by_length_within_both_limits():
    lengths = [3, 50, 20, 1, 20, 7, 8, 1, 1, 1]
    assert list(batches(lengths, 4, 40)) == [[1], [2, 4], [6, 5, 0, 3], [7, 8, 9]]
    assert list(batches(lengths, None, 40)) == [[1], [2, 4], [6, 5, 0, 3, 7], [8, 9]]
    assert list(batches([], 4, 40)) == []


@pytest.mark.parametrize("num_beams", [1, 4])
def test_batches_hold_as_many_tokens_as_are_allowed_for_all_beams_together(model, tokenizer, monkeypatch, num_beams):
    lengths = [len(ids) for ids in tokenizer(TEXTS)["input_ids"] if len(ids) > 1]
    shapes, generate = [], model.generate
    monkeypatch.setattr(
        model, "generate", lambda **inputs: shapes.append(inputs["input_ids"].shape) or generate(**inputs)
    )
    decode(model, tokenizer, TEXTS, batch_tokens=4 * max(lengths), num_beams=num_beams, max_new_tokens=2)
    allowed = 4 * max(lengths) // num_beams
    assert all(rows * length <= allowed or rows == 1 for rows, length in shapes)
    expected = list(batches(lengths, None, allowed))
    assert [rows for rows, _ in shapes] == [len(batch) for batch in expected]
    assert len(shapes) > 1 or num_beams == 1


# ---- Forced decoding ----
@pytest.mark.parametrize("count", [1, 2])
def test_in_8_bits_the_likelihood_is_that_of_the_search(tokenizer, monkeypatch, count):
    monkeypatch.setattr(linear, "ELEMENTS_FOR_INT8", 0)  # smaller ones too, on any processor
    members = [new_model(len(tokenizer), seed=seed, end=9.0, d_model=64) for seed in (2, 3)][:count]  # which end soon
    backend = ensemble(members, [tokenizer] * count)
    for one in members:
        engine.attach(one, "int8")
    sums = {"gnmt_length_penalty": None, "length_penalty": 0.0}  # scores are sums of log-probabilities
    lists = decode(backend, tokenizer, TEXTS, n_best=3, alignments=True, max_extra_length=9, **sums)
    rows = [one for row in lists for one in row if one.alignment is not None]
    pairs = [[list(ids) for ids in (one.alignment.source_ids, one.alignment.target_ids)] for one in rows]
    scores = [one.score for one in rows]
    assert backend.log_probabilities(*zip(*pairs, strict=True)) == pytest.approx(scores, rel=5e-3)
    for one in members:
        engine.detach(one)
    assert backend.log_probabilities(*zip(*pairs, strict=True)) != pytest.approx(scores, rel=5e-3)


# ---- Ensembles ----
@pytest.mark.parametrize("order", [1, -1])
def test_an_ensemble_ends_where_its_shortest_table_of_positions_does(model, tokenizer, order):
    sizes = {"position_encoding": "learned", "max_position_embeddings": 20}
    members = [model, new_model(len(tokenizer), **sizes).eval()][::order]
    ((found,),) = decode(ensemble(members, [tokenizer, tokenizer]), tokenizer, ["nine"], suppress_tokens=[2])
    assert found.num_tokens == 19  # behind the start token


# ---- What goes wrong ----
def test_members_of_different_vocabularies_are_refused(model, tokenizer):
    vocabulary = tokenizer.get_vocab()
    swapped = SimpleNamespace(get_vocab=lambda: {**vocabulary, "a": vocabulary["b"], "b": vocabulary["a"]})
    larger = new_model(len(tokenizer) + 1, seed=0, end=0.0)
    start = new_model(len(tokenizer), seed=0, end=0.0, decoder_start_token_id=0)
    for member, own, message in (
        (model, swapped, "model 2 has another tokenizer than model 1; an ensemble averages"),
        (larger, tokenizer, rf"model 2 has vocab_size={len(tokenizer) + 1} and model 1 vocab_size="),
        (start, tokenizer, "model 2 has decoder_start_token_id=0 and model 1 decoder_start_token_id=1; "),
    ):
        with pytest.raises(ValueError, match=message):
            ensemble([model, member], [tokenizer, own])


def test_a_translator_of_an_ensemble_takes_what_it_can_apply(model, other, tokenizer, monkeypatch):
    monkeypatch.setattr(torch, "set_num_threads", (set_to := []).append)
    both = ensemble([model, other], [tokenizer, tokenizer])
    Translator(both, tokenizer=tokenizer, threads=3)
    assert set_to == [3]
    for option in ({"device": "cpu"}, {"compute_type": "int8"}):
        with pytest.raises(ValueError, match="device and compute_type are those of an ensemble's members; load"):
            Translator(both, tokenizer=tokenizer, **option)


@pytest.mark.parametrize("given", [iter, lambda texts: dict.fromkeys(texts).keys()])
def test_sentences_are_iterated_over_once(model, tokenizer, given):
    expected = score_targets(model, tokenizer, TEXTS, TEXTS)
    assert score_targets(model, tokenizer, given(TEXTS), given(TEXTS)) == expected


def test_a_model_in_training_mode_is_refused(tokenizer, other):
    training = new_model(len(tokenizer), seed=0, end=0.0).train()
    for model in (training, ensemble([other, training], [tokenizer, tokenizer])):
        with pytest.raises(ValueError, match=r"in training mode.*model.eval\(\)"):
            decode(model, tokenizer, ["a"])
