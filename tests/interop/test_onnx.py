"""Our models as ONNX graphs: logits and greedy search in onnxruntime beside ours."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from opus_mt import opus_mt_folder
from transformers import AutoModelForSeq2SeqLM
from unlike import UNSHARED, small_model

from hf_vanilla_transformer import Translator, VanillaTransformerForConditionalGeneration, cli
from hf_vanilla_transformer.configuration_vanilla_transformer import POSITION_ENCODINGS
from hf_vanilla_transformer.interop.convert import convert
from hf_vanilla_transformer.interop.interface import ConversionError
from hf_vanilla_transformer.modeling_vanilla_transformer import sinusoidal_table

onnx = pytest.importorskip("onnx", reason="onnx isn't installed")
pytest.importorskip("onnxruntime", reason="onnxruntime isn't installed")
pytest.importorskip("onnxscript", reason="onnxscript isn't installed")
import onnx_ir  # noqa: E402
from graphs import PAIRS, Graphs, types_in  # noqa: E402

from hf_vanilla_transformer.interop import onnx as exporter  # noqa: E402

SCRIPT = Path(__file__).parents[2] / "scripts" / "translate_onnx.py"
GRAPHS = ("decoder_model_merged.onnx", "encoder_model.onnx")
# Two models have all that a configuration can ask for.
SINUSOIDS = {"position_encoding": "fairseq", "head_dim": 5, "value_head_dim": 7, "pad_token_id": 3}
LEARNED = {
    "position_encoding": "learned", "norm_position": "pre", "final_layer_norm": True, "layer_norm_eps": 0.1,
    "attention_bias": True, "output_bias": True, "scale_embedding": False, "tie_word_embeddings": False,
    "activation_function": "swish", "max_position_embeddings": 16,
}  # fmt: skip


def make_model(**fields):
    """In bfloat16, with large random weights, so that the output depends on each."""
    model = small_model(101, decoder_vocab_size=89, **UNSHARED, **fields)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter += 0.3 * torch.randn_like(parameter)
            elif "layers" in name:
                parameter *= 4 if "encoder_attn" in name else 2
    return model.to(torch.bfloat16)


class NoTokenizer:
    def save_pretrained(self, folder):
        pass


def example(model, batch, source, target):
    """Ids, a mask with padding on both sides, and a target."""
    config = model.config
    ids = torch.randint(4, config.vocab_size, (batch, source))
    mask = torch.ones_like(ids)
    for row in range(1, batch):
        mask[row, : row % 3], mask[row, source - row % 2 :] = 0, 0
    target = torch.randint(4, config.target_vocab_size, (batch, target))
    return ids.masked_fill(mask == 0, config.pad_token_id), mask, target


def compare(model, graphs, sizes):
    for batch, source, target in sizes:
        ids, mask, labels = example(model, batch, source, target)
        with torch.no_grad():
            expected = model(input_ids=ids, attention_mask=mask, decoder_input_ids=labels).logits
        for first, step in {(target, 1), (1, 1), (max(target - 3, 1), 2)}:
            found = graphs.logits(ids, mask, labels, first, step)
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


@pytest.fixture
def exported(exports):
    return exports("bpe")


@pytest.mark.slow
def test_graphs_with_sinusoids_have_no_longest_input(exported):
    place = exported.place / "onnx"
    assert exported.said.startswith(f"exported {exported.place / 'model'} into {place}\nnote: in float32, logits diff")
    assert "positions end" not in exported.said
    graphs = Graphs(place)
    compare(exported.model, graphs, [(1, 1, 1), (5, 9, 7), (3, 80, 90)])
    names = [f"{n}.{side}.{part}" for n in range(2) for side in ("decoder", "encoder") for part in ("key", "value")]
    past, present = ([f"{what}.{name}" for name in names] for what in ("past_key_values", "present"))
    kinds = {
        graphs.encoder: (["input_ids", "attention_mask"], ["last_hidden_state"]),
        graphs.decoder: (
            ["encoder_attention_mask", "input_ids", *past, "encoder_hidden_states", "use_cache_branch"],
            ["logits", *present],
        ),
    }
    for session, (inputs, outputs) in kinds.items():
        assert [one.name for one in session.get_inputs()] == inputs
        assert [one.name for one in session.get_outputs()] == outputs
        assert all(one.shape[0] == "batch" for one in session.get_inputs() if one.name != "use_cache_branch")
    assert json.loads((place / "config.json").read_text())["d_model"] == exported.model.config.d_model
    assert (place / "generation_config.json").is_file()


@pytest.mark.hard
@pytest.mark.parametrize("fields", [SINUSOIDS, LEARNED], ids=["sinusoids", "learned"])
def test_graphs_of_every_kind_of_model(fields, tmp_path):
    """Sinusoids aren't rounded as the weights are; learned positions end."""
    model = make_model(**fields)
    notes = exporter.write_onnx(model, NoTokenizer(), tmp_path)
    assert "the weights were bfloat16 and are float32 now" in notes
    assert ("positions end at 16: longer inputs are an error in onnxruntime" in notes) == (fields is LEARNED)
    exact = VanillaTransformerForConditionalGeneration(model.config).eval()
    exact.load_state_dict(model.state_dict())
    graphs = Graphs(tmp_path)
    compare(exact, graphs, [(1, 1, 1), (4, 16, 16)] if fields is LEARNED else [(1, 6, 4), (3, 33, 41)])
    if fields is LEARNED:
        ids, mask, target = example(exact, 1, 16, 17)
        with pytest.raises(Exception, match=r"out of data bounds|indices element"):
            graphs.logits(ids, mask, target, 16, 1)
        with pytest.raises(Exception, match=r"out of data bounds|indices element"):
            graphs.encode(torch.cat([ids, ids], dim=1), torch.ones(1, 32, dtype=torch.long))


@pytest.mark.slow
def test_many_weights_are_beside_the_graphs(exported, tmp_path, monkeypatch):
    """As protobuf ends at 2 GB."""
    monkeypatch.setattr(exporter, "LARGEST", 0)
    for name in GRAPHS:
        exporter.save(onnx_ir.load(exported.place / "onnx" / name), tmp_path / name)
    names = sorted(file.name for file in tmp_path.iterdir())
    assert names == [f"{name}{end}" for name in GRAPHS for end in ("", ".data")]
    compare(exported.model, Graphs(tmp_path), [(2, 5, 4)])


TEXTS = [*(one["source"] for one in PAIRS[:4]), "", "  ", "</s> <pad>", "日本 x"]


@pytest.mark.slow
def test_the_script_needs_no_torch(exported, tmp_path):
    """And reads the folder's settings."""
    model = VanillaTransformerForConditionalGeneration.from_pretrained(exported.place / "model")
    output = shutil.copytree(exported.place / "onnx", tmp_path / "it")
    model.generation_config.update(max_new_tokens=5, bad_words_ids=[[9], [11]], forced_eos_token_id=2)
    model.generation_config.save_pretrained(output)
    expected = Translator(model, "cpu", tokenizer=exported.tokenizer)(TEXTS, num_beams=1)
    blocked = "import sys; sys.modules |= dict.fromkeys(['torch', 'transformers']); sys.argv = sys.argv[1:]; "
    assert_script(["-c", f"{blocked}exec(open(sys.argv[0]).read())", SCRIPT, output], TEXTS, expected)
    assert len({*expected}) > 2


def assert_script(command, texts, expected):
    command, lines = [sys.executable, *command], "\n".join(texts) + "\n"
    done = subprocess.run(command, input=lines, capture_output=True, text=True, encoding="utf-8", check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "".join(f"{text}\n" for text in expected)


@pytest.mark.hard
def test_the_script_reads_opus_mt_models(tmp_path):
    convert(opus_mt_folder(tmp_path / "opus", separate_vocabs=True), tmp_path / "ours")
    command = ["export", "--model", str(tmp_path / "ours"), "--to", "onnx", "--output", str(tmp_path / "onnx")]
    assert cli.main(command) == 0
    texts = ["A man is riding a bicycle.", "", "It costs 3.50 euros, or 1,000 in total!", "日本"]
    expected = Translator(tmp_path / "ours", "cpu")(texts, num_beams=1, max_new_tokens=8)
    settings = json.loads((tmp_path / "onnx" / "generation_config.json").read_text()) | {"max_new_tokens": 8}
    (tmp_path / "onnx" / "generation_config.json").write_text(json.dumps(settings))
    assert_script([SCRIPT, tmp_path / "onnx"], texts, expected)


@pytest.mark.parametrize("encoding", [name for name in POSITION_ENCODINGS if name != "learned"])
@pytest.mark.parametrize("d_model", [28, 27])
def test_sinusoids_are_those_of_the_table(encoding, d_model):
    layout = d_model, encoding, 4 if encoding == "fairseq" else 0
    computed = exporter.Sinusoids(layout)
    for begin, end, most in ((0, 512, 0), (512, 2**16 + 100, 5e-7), (2**18 - 100, 2**18, 5e-7)):
        expected = sinusoidal_table(end - begin, d_model, encoding, layout[2] + begin)  # computed in float64
        found = computed(torch.arange(begin, end)[None], end)
        torch.testing.assert_close(found[0], expected, rtol=0, atol=most)
    padded = torch.tensor([[0, 0, 1, 2], [0, 1, 2, 3]])
    assert torch.equal(computed(padded, 4), sinusoidal_table(4, *layout)[padded])


@pytest.mark.slow
@pytest.mark.parametrize("error", [1e-3, float("nan")])
def test_graphs_that_compute_something_else_are_refused(exported, tmp_path, monkeypatch, error):
    logits, graphs = exporter._logits_of_graphs, exported.place / "onnx"
    monkeypatch.setattr(exporter, "_logits_of_graphs", lambda *arguments: logits(*arguments) + error)
    monkeypatch.setattr(exporter, "write_graphs", lambda *_: shutil.copytree(graphs, tmp_path, dirs_exist_ok=True))
    with pytest.raises(ConversionError, match="onnxruntime's logits differ from the model's by"):
        exporter.write_onnx(exported.model, exported.tokenizer, tmp_path)


# ---- For the browser ----
@pytest.fixture(params=["bpe", *(pytest.param(kind, marks=pytest.mark.hard) for kind in ("words", "characters"))])
def stock(request, exports):
    return exports(request.param)


@pytest.mark.slow
def test_the_merged_decoder_computes_both_branches(stock):
    graphs, theirs = Graphs(stock.folder / "onnx"), AutoModelForSeq2SeqLM.from_pretrained(stock.folder).eval()
    batch = stock.tokenizer([one["source"] for one in PAIRS[:5]], padding=True, return_tensors="pt")
    target = torch.randint(3, stock.model.config.vocab_size, (5, 9))
    with torch.no_grad():
        expected = [one(**batch, decoder_input_ids=target, use_cache=False).logits for one in (stock.model, theirs)]
    found = graphs.logits(batch["input_ids"], batch["attention_mask"], target, 2, 3)
    for one in expected:
        torch.testing.assert_close(found, one, atol=1e-4 * float(expected[0].abs().max()), rtol=0)


@pytest.mark.slow
def test_weights_are_there_once_and_nothing_is_in_double_precision(stock):
    """Which the runtime that transformers.js loads into a browser lacks."""
    names = [f"{name}{end}.onnx" for name in ("decoder_model_merged", "encoder_model") for end in ("", "_quantized")]
    assert sorted(file.name for file in (stock.folder / "onnx").iterdir()) == names
    graph = onnx.load(stock.folder / "onnx" / "decoder_model_merged.onnx").graph
    branches = [attribute.g for attribute in graph.node[0].attribute]
    assert [len(one.initializer) for one in branches] == [0, 0]
    decoder = sum(one.numel() for one in {*stock.model.model.decoder.parameters(), *stock.model.lm_head.parameters()})
    sinusoids = 2 * exporter.SPAN * stock.model.config.d_model
    weights = sum(np.prod(one.dims) for one in graph.initializer if one.data_type == 1) - sinusoids
    assert decoder * 0.9 < weights < decoder * 1.2  # a small matrix may be there transposed, too
    for file in (stock.folder / "onnx").iterdir():
        graph = onnx.load(file).graph
        types = types_in(graph)
        assert onnx.TensorProto.FLOAT in types
        assert onnx.TensorProto.DOUBLE not in types
        in_float32 = [one.name for one in graph.initializer if one.data_type == 1 and len(one.dims) == 2]
        assert bool(in_float32) is not file.stem.endswith("_quantized"), in_float32
        assert b'File "' not in file.read_bytes()  # stack traces of this machine
