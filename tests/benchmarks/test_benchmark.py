"""benchmarks: that it measures what it says, never how fast anything is."""

import json
import math
import os
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from transformers import MarianMTModel, MarianTokenizer
from transformers.utils import is_flash_attn_2_available

import benchmarks.__main__ as benchmark
from benchmarks import ablate, decoding, report, training, work, workers
from benchmarks import real as real_text
from benchmarks import text as text_to_text
from benchmarks.translators import Command, CTranslate2Translator, TransformersTranslator

SIZE = work.Size(d_model=16, heads=2, encoder_layers=2, decoder_layers=1, ffn_dim=32, vocab_size=300)
QUICK = ["--config", "tiny", "--device", "cpu", "--rounds", "1", "--batches", "1"]


class Local:
    """In place of a Worker: the contender in this process."""

    def __init__(self, entrant, threads):
        self.name, self.entrant = entrant.name, entrant
        self.restart()

    def restart(self):
        self.contender = self.entrant.make()

    def ask(self, method, *arguments, seconds=None):
        return 8_000_000 if method == "peak" else getattr(self.contender, method)(*arguments)

    def stop(self):
        pass


class NoMeter(ablate.Meter):
    """In place of a Meter, which forks: no process that has computed something may do so."""

    def measure(self, make, name, case, keeps):
        return 3_000_000 if keeps else 2_000_000


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    """The smallest model under the name of a real one, all in this process, and a peak that takes no time."""
    monkeypatch.setitem(work.SIZES, "tiny", SIZE)
    monkeypatch.setattr(benchmark, "measure_peak", lambda device, dtype: (1e12, "what the test says"))
    find_spec = benchmark.find_spec
    monkeypatch.setattr(benchmark, "find_spec", lambda name: None if name == "ctranslate2" else find_spec(name))
    local = lambda entrants, threads: nullcontext([Local(entrant, threads) for entrant in entrants])  # noqa: E731
    for module in (benchmark, ablate, real_text, text_to_text):
        monkeypatch.setattr(module, "start", local)
    monkeypatch.setattr(benchmark, "BATCHES_OF_ONE", 2)
    monkeypatch.setattr(text_to_text, "LONGEST", 4)  # tokens of a translation
    monkeypatch.setattr(ablate, "Meter", NoMeter)
    monkeypatch.setattr(workers, "PAUSE", 0.0)


def run(arguments, tmp_path, capsys):
    """Runs the script: its table, and its JSON."""
    benchmark.main([*arguments, "--json", str(tmp_path / "results" / "F.json")])
    return capsys.readouterr().out, json.loads((tmp_path / "results" / "F.json").read_text())


def test_train(tmp_path, capsys):
    table, found = run(["train", *QUICK, "--tokens", "64"], tmp_path, capsys)
    ((title, rows),) = found["tables"].items()
    assert title.startswith("updates: ")
    assert list(rows) == ["ours", "ours, plain call", "marian", "torch", "marian, kept memory"]
    shown = [f"\n{name} " for name in rows]
    shown += [work.TRAINING_FORMULA, "peak: 1,000.0 GFLOP/s, what the test says"]
    assert [one for one in shown if one not in table] == []
    assert (found["machine"]["torch"], found["settings"]["tokens"]) == (torch.__version__, 64)
    (case,) = benchmark.training_cases(benchmark.parse_arguments(["train", *QUICK, "--tokens", "64"]))
    for row in rows.values():
        assert len(row["rounds"]) == 1
        assert row["tokens/s"] == pytest.approx(row["rounds"][0])
        assert row["of marian"] == pytest.approx(row["tokens/s"] / rows["marian"]["tokens/s"])
        assert row["utilisation"] == pytest.approx(row["tokens/s"] * case.training_flops(SIZE) / case.tokens / 1e12)
        assert row["peak MB"] == 8


def test_generate(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(benchmark.DECODING_CASES, "beam 4, batch 32", (2, 3))
    cases = ["--cases", "greedy, batch 1", "beam 4, batch 32"]
    table, found = run(["generate", *QUICK, "--new-tokens", "6", *cases], tmp_path, capsys)
    tokens = {"greedy, batch 1": benchmark.BATCHES_OF_ONE * 6, "beam 4, batch 32": 3 * 6}
    for (title, rows), (name, count) in zip(found["tables"].items(), tokens.items(), strict=True):
        assert title.startswith(f"{name}: {count} target tokens per round, ")
        assert list(rows) == ["marian", "marian, kept memory", "ours", "ours, int8"]
        assert rows["ours"]["other lines"] == rows["marian"]["other lines"] == 0
        assert rows["ours"]["peak MB"] == 8
    assert "left out: ctranslate2, not installed" in table


def test_cases_are_left_out_when_time_is_up(tmp_path, capsys, monkeypatch):
    times = iter((0, 9, 11))
    monkeypatch.setattr(benchmark.time, "monotonic", lambda: next(times))
    monkeypatch.setitem(benchmark.DECODING_CASES, "greedy, batch 256", (1, 2))
    cases = ["--cases", "greedy, batch 256", "beam 4, batch 256", "--peers"]
    table, found = run(["generate", *QUICK, "--seconds", "10", *cases], tmp_path, capsys)
    assert len(found["tables"]) == 1
    assert "left out: beam 4, batch 256, as 10 seconds were over" in table


def test_text(tiny_checkpoint, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(text_to_text, "Command", lambda *arguments: SimpleNamespace(run=lambda: (0.5, 3_000_000)))
    (tmp_path / "in.en").write_text("half past nine\nit\nthe fourth of May\nleft out\n", encoding="utf-8")
    given = ["text", "--model", str(tiny_checkpoint), "--input", str(tmp_path / "in.en"), "--device", "cpu"]
    _, found = run([*given, "--rounds", "1", "--lines", "3", "--singles", "1"], tmp_path, capsys)
    tables = found["tables"]
    assert tables.pop("start") == {"ours": {"s": 0.5, "peak MB": 3}}
    assert list(tables) == ["beams: 1, 3 lines", "beams: 4, 3 lines"]
    for rows in tables.values():
        assert list(rows) == ["marian", "ours", "ours, int8"]
        assert rows["ours"]["other lines"] == 0
        assert all(row["ms, single lines"] > 0 for row in rows.values())
    with pytest.raises(SystemExit, match=r"benchmarks: --input nowhere.en has no lines"):
        benchmark.main([*given[:4], "nowhere.en"])


def test_a_command_is_measured_from_its_start_to_its_end():
    seconds, peak = Command(sys.executable, "-c", "import time; time.sleep(0.2); b'x' * 100_000_000").run()
    assert seconds > 0.2
    assert peak > 100_000_000
    with pytest.raises(RuntimeError, match="exit code 3"):
        Command(sys.executable, "-c", "import sys; sys.exit(3)").run()


# ---- Ablation ----
def test_ablate(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(benchmark.DECODING_CASES, "beam 4, batch 32", (2, 3))
    cases = ["greedy, batch 1", "beam 4, batch 32"]
    _, found = run(["ablate", *QUICK, "--tokens", "64", "--new-tokens", "3", "--cases", *cases], tmp_path, capsys)
    training_rows = ["everything", *ablate.TRAINING, "plain model", "marian"]
    decoding_rows = ["everything", *ablate.DECODING, "marian"]
    for memory, megabytes in (("kept", 3), ("fresh", 2)):
        rows = found["tables"][f"updates, {memory} memory"]
        assert list(rows) == training_rows
        for row in rows.values():
            seconds, everything = row["s per batch"], rows["everything"]["s per batch"]
            assert row["of everything"] == pytest.approx(seconds / everything)
            assert row["peak MB"] == megabytes
        for case in cases:
            rows = found["tables"][f"{case}, {memory} memory"]
            assert list(rows) == decoding_rows
            assert all(row["other lines"] == 0 for row in rows.values())
    assert found["tables"]["updates, kept memory"]["marian"]["peak MB"] == 3


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("train --tokens 20", "raise the tokens per batch"),
        ("ablate --dtype bfloat16", "decoding is measured in float32; give --only"),
    ],
)
def test_errors_name_the_fix(arguments, complaint):
    with pytest.raises(SystemExit, match=rf"^benchmarks: .*{complaint}"):
        benchmark.main([*arguments.split(), *QUICK])


# ---- Models ----
NEEDS_FLASH = pytest.mark.skipif(not is_flash_attn_2_available(), reason="flash attention needs a GPU and flash_attn")
MARKS = {"flash": NEEDS_FLASH, "compile": pytest.mark.hard}
MAKERS = [pytest.param(name, marks=[mark for word, mark in MARKS.items() if word in name]) for name in training.MAKERS]


@pytest.mark.parametrize("name", MAKERS)
def test_every_model_has_as_many_parameters_and_the_same_loss_at_first(name):
    """Smoothed cross-entropy of random predictions: about ln V, with whatever mask the padding has."""
    d, f, v = SIZE.d_model, SIZE.ffn_dim, SIZE.vocab_size
    attention, feed_forward, norm = 4 * (d * d + d), 2 * d * f + f + d, 2 * d
    encoder, decoder = attention + feed_forward + 2 * norm, 2 * attention + feed_forward + 3 * norm
    trainee = training.MAKERS[name](SIZE)
    trained = [one for one in trainee.model.parameters() if one.requires_grad]
    assert sum(one.numel() for one in trained) == v * d + 2 * encoder + decoder
    trainee.model.eval() if name in ("torch", "marian") else trainee.model.train()
    (batch,) = work.training_batches(SIZE, 400, 1)
    loss = trainee.loss(trainee.prepare(batch.tensors(SIZE, "cpu"))).item()
    assert math.log(SIZE.vocab_size) == pytest.approx(loss, abs=1.0)


@pytest.mark.parametrize("is_opus_mt", [False, True], ids=["", "OPUS-MT"])
def test_all_decoders_do_the_same_work(tmp_path, is_opus_mt):
    decoding.write_models(replace(SIZE, is_opus_mt=is_opus_mt), tmp_path)
    ours, marian = (TransformersTranslator(name, tmp_path / name) for name in ("ours", "marian"))
    peers = [ours]
    if find_spec("ctranslate2"):
        folder = decoding.convert_to_ctranslate2(tmp_path / "marian", tmp_path, "float32")
        peers.append(CTranslate2Translator(folder, tmp_path / "marian" / "vocab.json", "float32", 1))
    batches = work.decoding_batches(SIZE, 3, 2)
    for beams in (1, 4):
        case = work.Case(f"beam {beams}", batches, beams, new_tokens=8 + beams)
        workload = decoding.workload_of(case)
        expected = marian.run(workload).outputs
        lengths = [case.new_tokens] * 6
        assert [len(tokens) + 1 for tokens in expected] == lengths
        assert case.tokens == sum(lengths)
        # OPUS-MT's last token is forced, which CTranslate2's beams depend on.
        for peer in peers[: 1 if is_opus_mt and beams > 1 else 2]:
            assert peer.run(workload).outputs == expected


def uniform_batch(sentences, source_length, target_length):
    """A batch without padding."""
    return work.SentencePairs([[2] * source_length] * sentences, [[3] * target_length] * sentences)


# ---- Operations ----
def test_training_flops_by_hand():
    # Two sentences of 3 to 5 tokens; d 16, f 32, V 300, two layers of the encoder and one of the decoder.
    source = 6 * (2 * (4 * 256 + 2 * 512) + 2 * 256)  # source tokens: encoder, cross keys and values
    target = 10 * (6 * 256 + 2 * 512 + 300 * 16)
    attention = 2 * (2 * 3 * 3 + 5 * 5 / 2 + 5 * 3)  # sentences times (encoder's layers, decoder, cross)
    case = work.Case("c", (uniform_batch(2, 3, 5),))
    assert case.training_flops(SIZE) == 6 * (source + target) + 12 * 16 * attention


# ---- Turns and reports ----
def test_ratios_are_of_medians():
    case = work.Case("c", (uniform_batch(2, 3, 5),))
    turns = {"ours": (1, 2, 4), "marian": (4, 4, 40)}
    timings = {name: [workers.Timing(seconds) for seconds in own] for name, own in turns.items()}
    ours, marian = (rows := report.compare(case.tokens, "tokens/s", timings)).values()
    assert (ours["tokens/s"], marian["tokens/s"], ours["from"], ours["to"]) == (5, 2.5, 2.5, 10)
    assert (ours["of marian"], marian["of marian"]) == (2, 1)
    ours["utilisation"] = 0.5
    shown = str(report.Report("train", {}, {"c": rows})).splitlines()
    ours_shown = next(line for line in shown if line.startswith("ours "))
    assert ours_shown.split() == ["ours", "5.00", "2.50", "10.00", "2.00", "-", "50.0%"]


@pytest.mark.parametrize(
    ("make", "seconds", "message"),
    [
        (partial(time.sleep, 600), 0.5, r"odd: no answer within 0\.5 seconds"),
        (partial(os._exit, 3), None, r"(?s)odd.*exit code 3.*smaller --config"),
    ],
)
def test_a_contender_that_takes_too_long_or_fails_is_named(make, seconds, message):
    worker = workers.Worker(workers.Entrant("odd", make), 1)
    with pytest.raises(workers.BenchmarkError, match=message):
        worker.ask("run", seconds=seconds)
    assert worker.process.returncode is not None


# ---- Real text ----
TEXTS = {
    "en": ["a man rides a bike .", "two dogs run on the beach .", "a girl in a red dress", "the man is old"],
    "de": ["ein Mann fährt Rad .", "zwei Hunde rennen am Strand .", "ein Mädchen im roten Kleid", "der Mann ist alt"],
}


@pytest.fixture(scope="module")
def train_marian():
    pytest.importorskip("sentencepiece", reason="Marian's tokenizer needs it")
    return import_module("scripts.train_marian")


@pytest.fixture(scope="module")
def trained(train_marian, tmp_path_factory):
    """A folder with a tiny Marian model that scripts/train_marian.py has trained, and its texts."""
    folder = tmp_path_factory.mktemp("trained")
    for language, lines in TEXTS.items():
        (folder / f"train.{language}").write_text("\n".join(lines * 10) + "\n", encoding="utf-8")
    train_marian.main([*TRAINING, *files(folder), "--output-dir", str(folder / "marian")])
    return folder


TRAINING = ["--d-model", "16", "--layers", "1", "--heads", "2", "--ffn", "24", "--vocab-size", "60"]
TRAINING += ["--batch-tokens", "100", "--minutes", "0.02"]


def files(folder):
    names = {"--source": "en", "--target": "de", "--validation-source": "en", "--validation-target": "de"}
    return [part for name, language in names.items() for part in (name, str(folder / f"train.{language}"))]


def test_a_trained_marian(train_marian, trained):
    folder = trained / "marian"
    model, tokenizer = MarianMTModel.from_pretrained(folder), MarianTokenizer.from_pretrained(folder)
    vocabulary = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
    pad = len(vocabulary) - 1
    assert (vocabulary["</s>"], vocabulary["<unk>"], vocabulary["<pad>"]) == (0, 1, pad)
    assert model.config.vocab_size == len(vocabulary) == len(set(vocabulary.values()))
    assert not model.get_input_embeddings().weight[pad].any()
    assert model.final_logits_bias[0, pad] == 0 != model.final_logits_bias.std()
    settings = model.generation_config
    assert (settings.bad_words_ids, settings.forced_eos_token_id, settings.num_beams) == ([[pad]], 0, 4)
    assert tokenizer(TEXTS["en"][0])["input_ids"][-1] == 0
    target = tokenizer(text_target=TEXTS["de"][0])["input_ids"]
    assert tokenizer.decode(target, skip_special_tokens=True) == TEXTS["de"][0]
    with pytest.raises(SystemExit, match=r"is not empty; name another folder, or give --resume"):
        train_marian.main([*TRAINING, *files(trained), "--output-dir", str(folder)])


@pytest.mark.parametrize(
    "peers", [["marian"], pytest.param(["marian", "ctranslate2"], marks=pytest.mark.peers)], ids=" ".join
)
def test_real(trained, tmp_path, capsys, monkeypatch, peers):
    names = ["marian", "ours", "ours, int8"]
    if "ctranslate2" in peers:
        pytest.importorskip("ctranslate2")
        monkeypatch.undo()  # each contender in a process of its own
        names += [f"ctranslate2{kind}{tuned}" for kind in ("", ", int8") for tuned in ("", ", tuned")]
    given = ["--input", str(trained / "train.en"), "--reference", str(trained / "train.de"), "--threads", "1"]
    given += ["--model", str(trained / "marian"), "--max-new-tokens", "9", "--num-beams", "1", "2"]
    given += ["--rounds", "1", "--lines", "7", "--singles", "2", "--peers", *peers]
    out, found = run(["real", *given], tmp_path, capsys)
    found = found["tables"]
    searches = [f"{search}, {what}" for search in ("greedy", "beam 2") for what in ("all lines", "one line at a time")]
    assert list(found) == ["start", *searches]
    for title, table in found.items():
        assert f"\n{title}\n" in out
        assert list(table) == names
    assert all(row["peak MB"] > 1 and row["s to the first translation"] > 0 for row in found["start"].values())
    for search in searches:
        assert found[search]["ours"]["other lines"] == 0
        assert found[search]["marian"]["of marian"] == 1
    for row in found["greedy, all lines"].values():
        assert row["sentences/s"] == pytest.approx(row["rounds"][0])  # of one round
        assert "|tok:13a|" in row["BLEU"]
    if "ctranslate2" in peers:  # the same tokens, in whatever batches
        assert found["greedy, all lines"]["ctranslate2"]["other lines"] == 0
        assert found["start"]["ctranslate2"]["options"] is None
        assert found["start"]["ctranslate2, tuned"]["options"]["batch_tokens"] in real_text.BATCH_TOKENS_TRIED
