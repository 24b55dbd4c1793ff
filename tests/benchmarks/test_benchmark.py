"""benchmarks: that it measures what it says, never how fast anything is."""

import json
import math
import os
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoTokenizer

import benchmarks.__main__ as benchmark
from benchmarks import decoding, growth, models, programs, training, work, workers
from benchmarks import floor as floors
from benchmarks.floor import DecodingFloor, TrainingFloor
from benchmarks.report import Report
from hf_vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from hf_vanilla_transformer.evaluation.translation import translate

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
    table, report = run(["generate", *QUICK, "--peers", "marian,torch,ctranslate2"], tmp_path, capsys)
    assert [case["name"] for case in report["cases"]] == ["greedy, batch 1", "beam 2, batch 3"]
    assert [case["tokens"] for case in report["cases"]] == [benchmark.BATCHES_OF_ONE * 16, 3 * 16]
    for case in report["cases"]:
        results = {result["name"]: result for result in case["results"]}
        assert list(results) == ["ours", "ours, int8", "marian", "floor"]
        assert results["ours, int8"]["utilisation"] is None  # the peak is of another type
        assert results["ours"]["parameters"] == results["marian"]["parameters"]
        assert results["floor"]["note"].startswith("matrix products alone, each by the fastest of ")
    assert report["left_out"]["torch"] == "torch.nn.Transformer has no decoding"
    assert "left out: ctranslate2, not installed" in table
    assert work.DECODING_FORMULA in table


def test_bfloat16_leaves_int8_out(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(benchmark, "DECODING_CASES", {"greedy, batch 2": (1, 2)})
    _, report = run(["generate", *QUICK, "--dtype", "bfloat16", "--peers", "none"], tmp_path, capsys)
    assert [result["name"] for result in report["cases"][0]["results"]] == ["ours", "floor"]
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
        (["translate"], "the following arguments are required: --model, --input"),
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


def decoders(folder, cases):
    """Those of transformers."""
    decoding.write_models(SIZE, folder, with_marian=True)
    return {name: decoding.TransformersDecoder(name, folder, cases, "cpu", torch.float32) for name in models.KINDS}


def decoding_cases():
    batches = work.decoding_batches(work.LENGTHS["multi30k"], SIZE, 3, 2, seed=1)
    return tuple(work.Case(f"beam {beams}", batches, beams, new_tokens=16) for beams in (1, 4))


def test_all_decoders_do_the_same_work(tmp_path):
    cases = decoding_cases()
    found = decoders(tmp_path, cases)
    for case in cases:
        expected = found["marian"].translations(case.name)
        assert [len(tokens) for tokens in expected] == [16] * 3
        assert found["ours"].translations(case.name) == expected


def test_ctranslate2_does_the_same_work(tmp_path):
    pytest.importorskip("ctranslate2")
    cases = decoding_cases()
    found = decoders(tmp_path, cases)["marian"]
    decoding.convert_to_ctranslate2(tmp_path, ["float32"])
    peer = decoding.CTranslate2Decoder(cases, "cpu", tmp_path, "float32", threads=1)
    for case in cases:
        assert peer.translations(case.name) == found.translations(case.name)


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
    batch = work.uniform_batch(SIZE, 3, 4, 1)
    source = 12 * (2 * (4 * 256 + 2 * 512) + 2 * 256)
    target = (3 + 6) * (6 * 256 + 2 * 512 + 300 * 16)
    attention = 3 * 2 * 4 * 4 + 3 * (1 + 4) + 6 * (2 + 4)  # encoder, first step, second step
    case = work.Case("c", (batch,), beams=2, new_tokens=2)
    floor = DecodingFloor(SIZE, (case,), "cpu", torch.float32)
    assert floor.flops(batch, 2, 2) == case.flops(SIZE) == 2 * (source + target) + 4 * 16 * attention


def test_the_decoding_floor_computes_that():
    batch = work.uniform_batch(SIZE, 3, 4, 1)
    case = work.Case("c", (batch,), beams=2, new_tokens=3)
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


# Complete programs


def checkpoint(folder, tokenizer, **fields):
    torch.manual_seed(1)
    config = VanillaTransformerConfig(**{**CHECKPOINT, "vocab_size": len(tokenizer), **fields})
    model = VanillaTransformerForConditionalGeneration(config).eval()
    with torch.no_grad():  # so that translations differ from one another
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model


CHECKPOINT = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 1, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
CHECKPOINT |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "layer_norm_eps": 1e-5}


@pytest.mark.parametrize("bias", [False, True])
def test_a_checkpoint_as_marian(tmp_path, tiny_checkpoint, bias):
    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoint)
    ours = checkpoint(tmp_path, tokenizer, attention_bias=bias, position_encoding="marian")
    marian = programs.marian_of(ours)
    inputs = {"input_ids": torch.randint(3, 200, (3, 7)), "decoder_input_ids": torch.randint(3, 200, (3, 5))}
    with torch.no_grad():
        torch.testing.assert_close(ours(**inputs).logits, marian(**inputs).logits)


@pytest.mark.parametrize(
    "fields",
    [
        {"norm_position": "pre"},
        {"tie_word_embeddings": False},
        {"share_encoder_decoder_embeddings": False},
        {"position_encoding": "learned"},
        {"head_dim": 4, "value_head_dim": 4},
        {"value_head_dim": 16},
        {"output_bias": True},
    ],
)
def test_what_marian_cannot_be(tmp_path, tiny_checkpoint, fields):
    ours = checkpoint(tmp_path, AutoTokenizer.from_pretrained(tiny_checkpoint), **fields)
    with pytest.raises(work.BenchmarkError, match=r"^--model (must be post-norm|has weights that Marian lacks: )"):
        programs.marian_of(ours)


@pytest.mark.parametrize("content", [None, ""])
def test_a_file_to_translate_has_lines(tmp_path, tiny_checkpoint, content):
    file = tmp_path / "in.en"
    if content is not None:
        file.write_text(content)
    with pytest.raises(SystemExit, match=r"in\.en has no lines; give a file with one sentence per line"):
        benchmark.main(["translate", "--model", str(tiny_checkpoint), "--input", str(file)])


@pytest.mark.slow
@pytest.mark.parametrize("beams", ["1", "2"])
def test_programs_that_translate_a_file(tmp_path, tiny_checkpoint, capsys, beams):
    (tmp_path / "in.en").write_text("nine\nhalf\u2028past nine\n", encoding="utf-8")
    arguments = ["--model", str(tiny_checkpoint), "--input", str(tmp_path / "in.en"), "--rounds", "1", "--threads", "1"]
    arguments += ["--max-new-tokens", "4", "--json", str(tmp_path / "F.json"), "--num-beams", beams]
    arguments += ["--peers", "marian,ctranslate2"]
    benchmark.main(["translate", *arguments])
    out, err = capsys.readouterr()
    assert "left out: ctranslate2, not installed" in err
    assert "left out: marian, there is no program to compare" in err
    found = json.loads((tmp_path / "F.json").read_text())
    assert found["sentences"] == 2
    assert list(found["seconds"]) == ["ours", "ours, int8"]
    assert all(len(seconds) == 1 and seconds[0] > 0 for seconds in found["seconds"].values())
    assert found["different"]["ours"] == 0
    assert "sentences/s" in out


def test_a_program_that_fails_ends_the_run(tmp_path):
    file = tmp_path / "in.en"
    file.write_text("nine\n")
    with pytest.raises(work.BenchmarkError, match="a program failed: vanilla-transformer: error: "):
        programs.measure_programs(str(tmp_path), file, 1, 4, 1, 1, [], lambda what: None)


def test_ctranslate2_translates_a_checkpoint_as_we_do(tmp_path, tiny_checkpoint):
    ctranslate2 = pytest.importorskip("ctranslate2")
    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoint)
    ours = checkpoint(tmp_path / "ours", tokenizer)
    programs.convert(str(tmp_path / "ours"), tmp_path, ("float32",))
    lines = ["nine", "half past nine on the fourth of May", "drei Euro und fünf Cent"]
    words = [tokenizer.convert_ids_to_tokens(ids) for ids in tokenizer(lines)["input_ids"]]
    options = {"beam_size": 2, "max_decoding_length": 8, "length_penalty": 0.0}
    translator = ctranslate2.Translator(str(tmp_path / "float32"), "cpu")
    found = [result.hypotheses[0] for result in translator.translate_batch(words, **options)]
    theirs = [tokenizer.decode(tokenizer.convert_tokens_to_ids(one)) for one in found]
    assert theirs == translate(ours, tokenizer, lines, num_beams=2, gnmt_length_penalty=0.0, max_new_tokens=8)
