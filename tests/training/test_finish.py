"""What a finished run writes: translations line by line, whatever the model has written."""

from types import SimpleNamespace

from hf_vanilla_transformer.data.formats import Corpus
from hf_vanilla_transformer.training import finish
from hf_vanilla_transformer.training.evaluation import TranslationMetrics
from hf_vanilla_transformer.translation.evaluation import EvaluationResult


def test_each_translation_has_a_line(tmp_path, monkeypatch):
    for name, text in (("test.en", "one\ntwo\nthree\n"), ("test.de", "eins\nzwei\ndrei\n")):
        (tmp_path / name).write_text(text)
    written = ["eins und", "zwei", ""]
    monkeypatch.setattr(finish, "evaluate", lambda *_, **__: EvaluationResult({}, written, 3, 5, None, {}))
    corpus = Corpus((str(tmp_path / "test.en"),), (str(tmp_path / "test.de"),))
    model = SimpleNamespace(generation_config=SimpleNamespace(num_beams=1))
    metrics = TranslationMetrics(SimpleNamespace())
    evaluation, samples = finish._score("test", corpus, ["test.en"], tmp_path, (None, model), metrics)
    lines = (tmp_path / "test.translations.txt").read_text(encoding="utf-8").splitlines()
    assert lines == written
    assert evaluation.sentences == 3
    assert [sample.translation for sample in samples] == written
