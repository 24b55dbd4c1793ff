"""benchmarks: that it measures what it says, never how fast anything is."""

import json
import math
import os
from dataclasses import replace
from functools import partial
from importlib import import_module
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import MarianMTModel, MarianTokenizer

import benchmarks.__main__ as benchmark
from benchmarks import decoding, growth, models, training, work, workers
from benchmarks import floor as floors
from benchmarks.floor import DecodingFloor, TrainingFloor
from benchmarks.real import BATCH_TOKENS_TRIED, Contender
from benchmarks.report import Report

SIZE = work.Size(d_model=16, heads=2, encoder_layers=2, decoder_layers=1, ffn_dim=32, vocab_size=300)
QUICK = ["--config", "tiny", "--device", "cpu", "--rounds", "1", "--batches", "1", "--same-process"]
PNG = b"\x89PNG"


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    """The smallest model under the name of a real one, a peak that takes no time, two peers that aren't installed."""
    monkeypatch.setitem(work.SIZES, "tiny", SIZE)
    monkeypatch.setattr(benchmark, "measure_peak", lambda device, dtype: (1e12, "what the test says"))
    missing = {"fairseq", "ctranslate2"}
    find_spec = benchmark.find_spec
    monkeypatch.setattr(benchmark, "find_spec", lambda name: None if name in missing else find_spec(name))


def run(arguments, tmp_path, capsys):
    """Runs the script: its table, and its JSON."""
    benchmark.main([*arguments, "--json", str(tmp_path / "F.json"), "--chart", str(tmp_path / "charts" / "F.png")])
    assert (tmp_path / "charts" / "F.png").read_bytes().startswith(PNG)
    return capsys.readouterr().out, json.loads((tmp_path / "F.json").read_text())


def test_train(tmp_path, capsys):
    peers = "marian,torch,bart,fairseq,ctranslate2"
    table, report = run(["train", *QUICK, "--tokens", "64", "--peers", peers], tmp_path, capsys)
    (case,) = report["cases"]
    names = ["ours", "ours, plain call", "marian", "torch", "bart", "floor"]
    assert [result["name"] for result in case["results"]] == names
    for name in names:
        assert f"\n{name} " in table
    assert "left out: fairseq, not installed" in table
    assert report["left_out"] == {"fairseq": "not installed", "ctranslate2": "not installed"}
    assert report["baseline"] == "marian"
    assert report["machine"]["torch"] == torch.__version__
    assert work.TRAINING_FORMULA in table
    assert "peak: 1,000.0 GFLOP/s, what the test says" in table
    assert report["settings"]["tokens"] == 64
    by_name = {result["name"]: result for result in case["results"]}
    for result in case["results"]:
        assert len(result["rounds"]) == 1
        assert result["tokens_per_second"] == result["rounds"][0] > 0
        assert result["ratio"] == pytest.approx(result["tokens_per_second"] / by_name["marian"]["tokens_per_second"])
        flops_a_token = case["model_flops"] / case["tokens"]
        assert result["utilisation"] == pytest.approx(result["tokens_per_second"] * flops_a_token / 1e12)
    same = [by_name[name]["parameters"] for name in ("ours", "ours, plain call", "marian", "torch")]
    assert len(set(same)) == 1


def test_generate(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(benchmark, "DECODING_CASES", {"greedy, batch 1": (1, 1), "beam 2, batch 3": (2, 3)})
    table, report = run(
        ["generate", *QUICK, "--new-tokens", "16", "--peers", "marian,torch,ctranslate2"], tmp_path, capsys
    )
    assert [case["name"] for case in report["cases"]] == ["greedy, batch 1", "beam 2, batch 3"]
    assert [case["tokens"] for case in report["cases"]] == [benchmark.BATCHES_OF_ONE * 16, 3 * 16]
    assert report["settings"]["new_tokens"] == 16
    for case in report["cases"]:
        results = {result["name"]: result for result in case["results"]}
        assert list(results) == ["ours", "ours, int8", "marian", "floor"]
        assert results["ours, int8"]["utilisation"] is None  # the peak is of another type
        assert results["ours"]["parameters"] == results["marian"]["parameters"] + SIZE.vocab_size  # the output bias
        assert results["ours"]["different"] == results["marian"]["different"] == 0
        assert results["floor"]["different"] is None
        assert results["floor"]["note"].startswith("matrix products alone, each by the fastest of ")
    assert report["left_out"]["torch"] == "torch.nn.Transformer has no decoding"
    assert "left out: ctranslate2, not installed" in table
    assert work.DECODING_FORMULA in table


def test_bfloat16_leaves_int8_out(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(benchmark, "DECODING_CASES", {"greedy, batch 2": (1, 2), "another": (1, 1)})
    _, report = run(
        ["generate", *QUICK, "--dtype", "bfloat16", "--peers", "none", "--cases", "greedy, batch 2"], tmp_path, capsys
    )
    (case,) = report["cases"]
    assert [result["name"] for result in case["results"]] == ["ours", "floor"]
    assert report["baseline"] == "ours"


def test_end_to_end(tmp_path, capsys):
    for name, words in (("train.en", "a man in a blue shirt"), ("train.de", "ein Mann in einem blauen Hemd")):
        lines = [" ".join(words.split()[: 2 + number % 5]) for number in range(80)]
        (tmp_path / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    options = ["--end-to-end", "--data_dir", str(tmp_path), "--updates", "2", "--tokens", "64"]
    table, report = run(["train", *QUICK, *options], tmp_path, capsys)
    results = {result["name"]: result for result in report["cases"][0]["results"]}
    assert list(results) == ["ours", "marian"]
    assert results["ours"]["parameters"] == results["marian"]["parameters"]
    assert results["marian"]["tokens_per_second"] > 0
    assert "batches of 64 tokens" in results["ours"]["note"]
    assert "left out: torch, " in table


def test_growth(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(growth, "VALUES", {"batch": (1, 2), "length": (2, 5)})
    monkeypatch.setattr(growth, "Point", partial(growth.Point, batch=1, vocabulary=50, layers=1))
    arguments = ["generate", "--device", "cpu", "--rounds", "1", "--growth", str(tmp_path / "growth")]
    benchmark.main(arguments)
    found = json.loads((tmp_path / "growth" / "growth.json").read_text())["seconds"]
    assert {axis: [point["value"] for point in points] for axis, points in found.items()} == {
        "batch": [1, 2],
        "length": [2, 5],
    }
    assert all(point["ours"] > 0 and point["floor"] > 0 for points in found.values() for point in points)
    for axis in found:
        assert (tmp_path / "growth" / f"growth_{axis}.png").read_bytes().startswith(PNG)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["train", "--peers", "marian,moses"], "there is no peer 'moses'; choose of marian, torch"),
        (
            ["generate", "--cases", "greedy"],
            "there is no case 'greedy'; choose of 'greedy, batch 1', 'greedy, batch 32'",
        ),
        (["train", "--end-to-end"], "--end-to-end needs --data_dir"),
        (["train", "--dtype", "float16"], "--dtype bfloat16 or float32"),
        (["train", "--tokens", "20"], "raise the tokens per batch"),
        (["train", "--end-to-end", "--data_dir", "nowhere"], "--data_dir is the folder with Multi30k's"),
    ],
)
def test_errors_name_the_fix(arguments, complaint):
    with pytest.raises(SystemExit, match=r"^benchmarks: ") as error:
        benchmark.main([*arguments, *QUICK])
    assert complaint in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["train", "--config", "huge"], "invalid choice: 'huge'"),
        (["generate", "--rounds", "0"], "0 is too few; give 1 or more"),
        (["real"], "the following arguments are required: --model, --input, --reference"),
        (["decode"], "invalid choice: 'decode'"),
    ],
)
def test_the_command_line_is_checked(arguments, complaint, capsys):
    with pytest.raises(SystemExit):
        benchmark.main(arguments)
    assert complaint in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu():
    with pytest.raises(SystemExit, match="give --device cpu"):
        benchmark.main(["train", "--device", "cuda"])


# ---- Models ----
@pytest.mark.parametrize("name", training.MAKERS)
def test_every_model_has_as_many_parameters(name):
    d, f, v = SIZE.d_model, SIZE.ffn_dim, SIZE.vocab_size
    attention, feed_forward, norm = 4 * (d * d + d), 2 * d * f + f + d, 2 * d
    encoder, decoder = attention + feed_forward + 2 * norm, 2 * attention + feed_forward + 3 * norm
    trainee = training.MAKERS[name](SIZE)
    own = sum(trainee.alone.values())
    assert models.count_parameters(trainee.model) - own == v * d + 2 * encoder + decoder


def test_another_number_of_parameters_is_an_error():
    facts = {"ours": workers.Facts(10), "bart": workers.Facts(12, {"positions": 2}), "floor": workers.Facts()}
    benchmark.check_parameters(facts)
    with pytest.raises(work.BenchmarkError, match=r"marian has 11 parameters and ours 10, .* fix its builder"):
        benchmark.check_parameters({**facts, "marian": workers.Facts(11)})


@pytest.mark.parametrize("name", training.MAKERS)
def test_every_model_has_the_same_loss_at_first(name):
    """Smoothed cross-entropy of random predictions: about ln V, with whatever mask the padding has."""
    torch.manual_seed(0)
    trainee = training.MAKERS[name](SIZE)
    trainee.model.eval() if name in ("torch", "marian", "bart") else trainee.model.train()
    (batch,) = work.training_batches(work.LENGTHS["multi30k"], SIZE, 400, 1, seed=0)
    loss = trainee.loss(trainee.prepare(batch.tensors("cpu"))).item()
    assert math.log(SIZE.vocab_size) == pytest.approx(loss, abs=1.0)


@pytest.fixture(params=[False, True], ids=["", "OPUS-MT"])
def size(request):
    return replace(SIZE, is_opus_mt=request.param)


def decoders(size, folder, cases):
    """Those of transformers."""
    decoding.write_models(size, folder)
    return {name: decoding.TransformersDecoder(name, folder, cases, "cpu", torch.float32) for name in models.KINDS}


def decoding_cases():
    batches = work.decoding_batches(work.LENGTHS["multi30k"], SIZE, 3, 2, seed=1)
    return tuple(work.Case(f"beam {beams}", batches, beams) for beams in (1, 4))


def test_all_decoders_do_the_same_work(size, tmp_path):
    cases = decoding_cases()
    found = decoders(size, tmp_path, cases)
    for case in cases:
        turn = found["marian"].run(case.name)
        lengths = [int(batch.target_lengths.max()) for batch in case.batches for _ in range(3)]
        assert [len(tokens) + 1 for tokens in turn.outputs] == lengths
        assert turn.tokens == case.tokens == sum(lengths)
        assert len(set(lengths)) == 2
        assert found["ours"].run(case.name).outputs == turn.outputs


def test_a_forced_translation_of_opus_mt_ends(tmp_path):
    """Its end of sentence comes last and only there, and padding nowhere."""
    (case, _) = decoding_cases()
    size = replace(SIZE, is_opus_mt=True)
    for decoder in decoders(size, tmp_path, (case,)).values():
        batch = case.batches[0]
        tokens = decoder._generate(decoder._prepare(batch), 4, batch.new_tokens)
        assert (tokens[:, -1] == models.END).all()
        assert not torch.isin(tokens[:, 1:-1], torch.tensor([models.END, size.pad])).any()


def test_ctranslate2_does_the_same_work(size, tmp_path):
    pytest.importorskip("ctranslate2")
    cases = decoding_cases()[: 1 if size.is_opus_mt else 2]  # OPUS-MT's last token is forced, which beams depend on
    found = decoders(size, tmp_path, cases)["marian"]
    decoding.convert_to_ctranslate2(tmp_path / "marian", tmp_path, ["float32"])
    peer = decoding.CTranslate2Decoder(cases, "cpu", tmp_path, "float32", threads=1)
    for case in cases:
        turn = peer.run(case.name)
        assert turn.outputs == found.run(case.name).outputs
        assert turn.tokens == case.tokens


def test_ctranslate2_has_variants_at_the_size_of_opus_mt(tmp_path, monkeypatch):
    monkeypatch.setattr(decoding, "convert_to_ctranslate2", lambda *arguments: None)
    work_of = {"cases": (), "device": "cpu", "dtype": torch.float32, "threads": 1, "folder": tmp_path}
    entrants = decoding.decoding_entrants(["ctranslate2"], replace(SIZE, is_opus_mt=True), **work_of)
    variables = {entrant.name: entrant.environment for entrant in entrants}
    assert variables["ctranslate2"] == variables["ctranslate2, int8"] == {}
    assert variables["ctranslate2, MKL"] == decoding.environments("float32")["MKL"]
    assert variables["ctranslate2, MKL"]["CT2_USE_MKL"] == "1"
    assert "ctranslate2, int8, MKL" not in variables
    entrants = decoding.decoding_entrants(["ctranslate2"], SIZE, **work_of)
    assert [entrant.name for entrant in entrants if entrant.environment] == []


def says_a_variable():
    return SimpleNamespace(facts=lambda case="": workers.Facts(note=os.environ["CT2_USE_MKL"]))


@pytest.mark.slow
def test_the_environment_of_a_contender_is_its_own():
    worker = workers.ProcessWorker(workers.Entrant("one", says_a_variable, environment={"CT2_USE_MKL": "1"}), "cpu", 1)
    assert worker.facts().note == "1"
    assert "CT2_USE_MKL" not in os.environ
    worker.stop()


# ---- Batches ----
@pytest.mark.parametrize("name", work.LENGTHS)
def test_lengths_are_as_said(name):
    lengths = work.LENGTHS[name]
    source, target = lengths.draw(seed=0)
    for side in (source, target):
        assert side.mean() == pytest.approx(lengths.mean, rel=0.02)
        assert side.std() == pytest.approx(lengths.deviation, rel=0.1)
    assert np.corrcoef(np.log(source), np.log(target))[0, 1] == pytest.approx(lengths.correlation, abs=0.05)


def test_training_batches_have_about_as_many_real_tokens():
    lengths = replace(work.LENGTHS["wmt"], pairs=5_000)
    batches = work.training_batches(lengths, SIZE, 1000, 20, seed=0)
    assert len(batches) == 20
    assert np.mean([batch.target_tokens for batch in batches]) == pytest.approx(1000, rel=0.1)
    case = work.Case("updates", batches)
    assert case.tokens == sum(int((batch.target != -100).sum()) for batch in batches)
    real = sum(int((side != other).sum()) for b in batches for side, other in ((b.source, SIZE.pad), (b.target, -100)))
    assert case.padding == pytest.approx(1 - real / sum(b.source.size + b.target.size for b in batches))
    assert 0 < case.padding < 0.3
    again = work.training_batches(lengths, SIZE, 1000, 20, seed=0)
    assert all((one.source == other.source).all() for one, other in zip(batches, again, strict=True))


# ---- Operations ----
def test_training_flops_by_hand():
    # Two sentences of 3 to 5 tokens; d 16, f 32, V 300, two layers of the encoder and one of the decoder.
    batch = work.uniform_batch(SIZE, 2, 3, 5)
    source = 6 * (2 * (4 * 256 + 2 * 512) + 2 * 256)  # source tokens: encoder, cross keys and values
    target = 10 * (6 * 256 + 2 * 512 + 300 * 16)
    attention = 2 * (2 * 3 * 3 + 5 * 5 + 5 * 3)  # sentences times (encoder's layers, decoder, cross)
    floor = TrainingFloor(SIZE, (work.Case("c", (batch,)),), "cpu", torch.float32)
    assert floor.flops(batch) == 6 * (source + target) + 12 * 16 * attention
    future = 12 * 16 * 2 * 5 * 5 / 2  # what a product computes of the future and a formula doesn't
    assert work.Case("c", (batch,)).flops(SIZE) == floor.flops(batch) - future


def test_the_training_floor_computes_that():
    batch = work.uniform_batch(SIZE, 2, 3, 5)
    floor = TrainingFloor(SIZE, (work.Case("c", (batch, batch)),), "cpu", torch.float64)  # torch doesn't count oneDNN's
    floor.run("c")
    with FlopCounterMode(display=False) as counter:
        timing = floor.run("c")
    assert counter.get_total_flops() == 2 * floor.flops(batch)
    assert timing.tokens == 20


def test_the_products_of_the_training_floor_are_one_another():
    """Whatever is faster computes the same: each product of the one kind has one of the other's beside it."""
    batch = work.uniform_batch(SIZE, 2, 3, 5)
    case = work.Case("c", (batch,))
    floor = TrainingFloor(SIZE, (case,), "cpu", torch.float32)
    if len(floor.kinds) < 2:
        pytest.skip("this torch has no oneDNN")
    plain, other = (floor._calls(batch, case, kind) for kind in floor.kinds)
    for one, two in zip(plain, other, strict=True):
        if one.func is not two.func:
            expected, found = torch.mm(*one.args), two()
            found = found if found.shape == expected.shape else found.t()
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    # All but those of attention.
    assert {one.func for one, two in zip(plain, other, strict=True) if one.func is two.func} == {torch.bmm}


def test_the_floor_takes_the_fastest_of_each_product(monkeypatch):
    class Planned(floors._Floor):
        def _calls(self, batch, case, kind):
            return [kind + batch, kind + "again"]

    planned = {"a1": 3, "b1": 2, "aagain": 1, "bagain": 2, "a2": 1, "b2": 2}
    monkeypatch.setattr(floors, "_time", lambda calls, device: sum(planned[call] for call in calls))
    case = SimpleNamespace(name="c", batches=["1", "2"], tokens=5)
    floor = Planned((case,), "cpu", ["a", "b"])
    assert floor.run("c").seconds == 2 + 1 + 1 + 1
    assert floor.fastest["c"] == ["b1", "aagain", "a2", "aagain"]
    assert "the fastest of a and b" in floor.facts("c").note


def test_a_model_computes_that():
    """Marian, as torch counts it, and the formula are the same but for the future."""
    batch = work.uniform_batch(SIZE, 2, 3, 5)
    case = work.Case("c", (batch,))
    contender = training.TrainingContender("marian", SIZE, (case,), "cpu", torch.float32)
    contender.trainee.model.set_attn_implementation("eager")  # others compute scores twice
    with FlopCounterMode(display=False) as counter:
        contender.run("c")
    assert counter.get_total_flops() == case.flops(SIZE) + 12 * 16 * 2 * 5 * 5 / 2


def test_decoding_flops_by_hand():
    # Three sentences of 4 tokens, a beam of 2, two steps: three rows, then six.
    batch = work.uniform_batch(SIZE, 3, 4, 2)
    source = 12 * (2 * (4 * 256 + 2 * 512) + 2 * 256)
    target = (3 + 6) * (6 * 256 + 2 * 512 + 300 * 16)
    attention = 3 * 2 * 4 * 4 + 3 * (1 + 4) + 6 * (2 + 4)  # encoder, first step, second step
    case = work.Case("c", (batch,), beams=2)
    floor = DecodingFloor(SIZE, (case,), "cpu", torch.float32)
    assert floor.flops(batch, 2, 2) == case.flops(SIZE) == 2 * (source + target) + 4 * 16 * attention


def test_the_decoding_floor_computes_that():
    batch = work.uniform_batch(SIZE, 3, 4, 3)
    case = work.Case("c", (batch,), beams=2)
    floor = DecodingFloor(SIZE, (case,), "cpu", torch.bfloat16)  # torch doesn't count packed products
    floor.run("c")
    with FlopCounterMode(display=False) as counter:
        floor.run("c")
    assert counter.get_total_flops() == floor.flops(batch, 2, 3)


def test_peak(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(benchmark, "PEAK_SIDES", {"cpu": (16,)})
    flops, how = benchmark.measure_peak("cpu", torch.bfloat16, seconds=0.0)
    assert flops > 0
    assert how == "the best product of 16 x 16 matrices in bfloat16"


# ---- Turns and reports ----
class Fake:
    """A contender that takes down its turns."""

    def __init__(self, name, seconds, log):
        self.name, self.seconds, self.log = name, iter(seconds), log

    def run(self, case):
        self.log.append(self.name)
        return workers.Timing(next(self.seconds), 100)

    def facts(self, case=""):
        return workers.Facts(note=case, has_memory=self.name == "A")


def test_turns_alternate():
    log = []
    fakes = [Fake("A", [9, 1, 2, 3], log), Fake("B", [9, 4, 5, 6], log)]
    timings = workers.take_turns(fakes, "c", rounds=3)
    assert log == ["A", "B"] * 4
    assert {name: [turn.seconds for turn in turns] for name, turns in timings.items()} == {
        "A": [1, 2, 3],
        "B": [4, 5, 6],
    }


def test_ratios_are_of_medians():
    report = Report("train", SIZE, {}, "", peak_flops=1e9, peak_at="", left_out={})
    batch = work.uniform_batch(SIZE, 2, 3, 5)
    turns = {"ours": (1, 2, 4), "marian": (4, 4, 40), "floor": (1, 1, 1)}
    timings = {name: [workers.Timing(seconds, 10) for seconds in all_of] for name, all_of in turns.items()}
    facts = dict.fromkeys(turns, workers.Facts())
    case = work.Case("c", (batch,))
    report.add("c", case, timings, facts, {"ours": 7_000_000, "marian": None, "floor": None})
    ours, marian, floor = report.cases[0].results
    assert (ours.tokens_per_second, marian.tokens_per_second) == (5, 2.5)
    assert (ours.ratio, marian.ratio, floor.ratio) == (2, 1, 4)
    assert ours.floor_share == 0.5
    assert ours.utilisation == pytest.approx(case.flops(SIZE) / 2 / 1e9)  # a round takes it two seconds
    assert " 7  " in str(report).splitlines()[6]


def exits():
    os._exit(3)


def fails():
    raise ValueError("no such model")


@pytest.mark.slow
@pytest.mark.parametrize(("make", "complaint"), [(exits, "exit code 3.*smaller --config"), (fails, "no such model")])
def test_a_contender_that_fails_is_named(make, complaint):
    worker = workers.ProcessWorker(workers.Entrant("odd", make), "cpu", 1)
    with pytest.raises(work.BenchmarkError, match=f"(?s)odd.*{complaint}"):
        worker.facts()
    worker.stop()


@pytest.mark.slow
def test_processes_of_their_own_have_a_peak_memory():
    batch = work.uniform_batch(SIZE, 64, 32, 32)
    make = partial(training.TrainingContender, "ours", SIZE, (work.Case("c", (batch,)),), "cpu", torch.float32)
    (worker,) = workers.start([workers.Entrant("ours", make, keep_freed_memory=True)], "cpu", 1, same_process=False)
    assert worker.run("c").tokens == 64 * 32
    peak = worker.close()
    assert 1_000_000 < peak < 1_000_000_000
    worker.stop()
    assert not worker.process.is_alive()


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


def test_a_trained_marian(train_marian, trained, capsys):
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
    # It goes on from where it was, and nothing is overwritten unasked.
    before = torch.load(folder / train_marian.STATE)
    again = [*TRAINING, *files(trained), "--output-dir", str(folder)]
    with pytest.raises(SystemExit, match=r"is not empty; name another folder, or give --resume"):
        train_marian.main(again)
    train_marian.main([*again, "--minutes", "0.05", "--resume"])
    after = torch.load(folder / train_marian.STATE)
    assert after["update"] > before["update"]
    assert after["seconds"] > 0.05 * 60 > before["seconds"]
    assert "validation, greedy: BLEU" in capsys.readouterr().out


def real(folder, *arguments):
    given = ["--input", str(folder / "train.en"), "--reference", str(folder / "train.de"), "--threads", "1"]
    given += [
        "--model",
        str(folder / "marian"),
        "--rounds",
        "1",
        "--lines",
        "7",
        "--singles",
        "2",
        "--max-new-tokens",
        "9",
    ]
    benchmark.main(["real", *given, *arguments])


@pytest.mark.slow
@pytest.mark.parametrize("peers", ["marian", "marian,ctranslate2"])
def test_real(trained, tmp_path, capsys, monkeypatch, peers):
    names = ["marian", "ours", "ours, int8"]
    if "ctranslate2" in peers:
        pytest.importorskip("ctranslate2")
        monkeypatch.undo()
        names += [f"ctranslate2{kind}{tuned}" for kind in ("", ", int8") for tuned in ("", ", tuned")]
    real(trained, "--peers", peers, "--num-beams", "1", "2", "--json", str(tmp_path / "F.json"))
    out = capsys.readouterr().out
    found = json.loads((tmp_path / "F.json").read_text())["tables"]
    searches = [f"{search}, {what}" for search in ("greedy", "beam 2") for what in ("all lines", "one line at a time")]
    assert list(found) == ["start", *searches]
    for title, table in found.items():
        assert f"\n{title}\n" in out
        assert list(table) == names
    assert all(row["peak MB"] > 10 and row["s to the first translation"] > 0 for row in found["start"].values())
    for search in searches:
        assert found[search]["ours"]["other lines"] == 0
        assert found[search]["marian"]["of marian"] == 1
    for row in found["greedy, all lines"].values():
        assert row["sentences/s"] == 7 / row["rounds"][0]
        assert "|tok:13a|" in row["BLEU"]
    if "ctranslate2" in peers:  # the same tokens, in whatever batches
        assert found["greedy, all lines"]["ctranslate2"]["other lines"] == 0
        assert found["start"]["ctranslate2"]["options"] == "-"
        assert found["start"]["ctranslate2, tuned"]["options"]["batch_tokens"] in BATCH_TOKENS_TRIED


@pytest.mark.parametrize("missing", ["--input", "--reference"])
def test_files_of_real_text_have_lines(trained, tmp_path, missing):
    (tmp_path / "empty").write_text("")
    with pytest.raises(
        SystemExit, match=rf"^benchmarks: {missing} .*empty has no lines; give a file with one sentence"
    ):
        real(trained, missing, str(tmp_path / "empty"))
    (tmp_path / "short").write_text("a line\n")
    with pytest.raises(SystemExit, match=r"^benchmarks: --input has . lines and --reference ."):
        real(trained, missing, str(tmp_path / "short"))


@pytest.mark.slow
def test_a_program_that_fails_is_named(tmp_path):
    settings = {"kind": "marian", "folder": str(tmp_path), "compute_type": "", "threads": 1, "vocabulary": ""}
    contender = Contender("marian", settings)
    contender.start()
    with pytest.raises(
        work.BenchmarkError,
        match=r"(?s)^marian failed; leave it out, or fix .*no file named model\.safetensors",
    ):
        contender.translate(batches=[[[0]]], beams=1, longest=1)
    contender.process.kill()
    with pytest.raises(work.BenchmarkError, match=r"^marian: its process ended unexpectedly \(exit code -9\)"):
        contender.translate(batches=[[[0]]], beams=1, longest=1)
    contender.stop()
