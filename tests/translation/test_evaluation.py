"""`evaluate`: scores and perplexity are those of the library's functions, whatever the model is given as."""

import pytest
from random_models import TEXTS, new_model

from hf_vanilla_transformer import Translator, evaluate
from hf_vanilla_transformer.data.symbols import train_tokenizer
from hf_vanilla_transformer.metrics import by_source, measure, top_accuracy
from hf_vanilla_transformer.translation.scoring import score_targets

OPTIONS = {"num_beams": 2, "max_new_tokens": 5}
REFERENCES = [text.upper() or "x" for text in TEXTS]


def test_figures_are_those_of_the_librarys_functions(checkpoint):
    translator = Translator(checkpoint, "cpu")
    result = evaluate(translator, TEXTS, REFERENCES, n_best=2, **OPTIONS)
    rows = [[one.text for one in row] for row in translator(TEXTS, n_best=2, **OPTIONS)]
    assert result.translations == [row[0] for row in rows]
    assert result.scores == measure(["bleu", "chrf"], result.translations, REFERENCES) | {
        f"top_{count}": top_accuracy(rows, REFERENCES, count) for count in (1, 2)
    }
    assert result.likelihood == score_targets(translator.model, translator.tokenizer, TEXTS, REFERENCES)
    assert set(result.seconds) == {"scoring", "decoding"}
    for model, options in ((checkpoint, {}), (translator.model, {"tokenizer": translator.tokenizer})):
        again = evaluate(model, TEXTS, [[one, "y"] for one in REFERENCES], perplexity=False, **options, **OPTIONS)
        assert (again.translations, again.likelihood, *again.seconds) == (result.translations, None, "decoding")


def test_equal_sources_of_symbols_are_one_sentence():
    tokenizer = train_tokenizer([{"source": "abc", "target": "xyz"}], ["characters", "characters"])
    result = evaluate(new_model(len(tokenizer)), ["ab", "c", "ab"], ["x", "y", "z"], tokenizer=tokenizer, **OPTIONS)
    assert (len(result.translations), result.num_sentences, list(result.scores)) == (3, 2, ["exact_match", "ser"])
    assert result.measures.unknown == "<unk>"  # of which "cer" counts one character


def test_a_wrong_measure_is_an_error_before_anything_is_translated(checkpoint):
    for options in ({"metrics": ["blue"]}, {"tokenize": "moses"}):
        with pytest.raises(ValueError, match=r"there is no measure 'blue'|unknown tokenize='moses'"):
            evaluate(Translator(checkpoint, "cpu"), TEXTS, REFERENCES, **options)


def test_numbers_of_sources_and_references_are_compared_first():
    with pytest.raises(ValueError, match="2 sources and 1 references"):
        evaluate("nowhere", ["a", "b"], ["x"])
    with pytest.raises(ValueError, match="2 sources and 3 references"):
        by_source(["a", "b"], ["x", "y", "z"])
