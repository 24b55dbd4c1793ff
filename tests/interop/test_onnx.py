"""Our models as ONNX graphs: logits and greedy search in onnxruntime beside ours."""

import contextlib
import io
import itertools
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from opus_mt import opus_mt_folder
from transformers import AutoTokenizer
from transformers.activations import ACT2FN

from hf_vanilla_transformer import (
    Translator,
    VanillaTransformerConfig,
    VanillaTransformerForConditionalGeneration,
    cli,
)
from hf_vanilla_transformer.configuration_vanilla_transformer import POSITION_ENCODINGS
from hf_vanilla_transformer.interop.convert import convert
from hf_vanilla_transformer.interop.interface import ConversionError
from hf_vanilla_transformer.modeling_vanilla_transformer import sinusoidal_table

onnx = pytest.importorskip("onnx", reason="onnx isn't installed")
onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime isn't installed")
pytest.importorskip("onnxscript", reason="onnxscript isn't installed")
from hf_vanilla_transformer.interop import onnx as exporter  # noqa: E402

SCRIPT = Path(__file__).parents[2] / "scripts" / "translate_onnx.py"
# Where all sizes differ from one another, no axis can be taken for another.
SIZES = {
    "vocab_size": 101,
    "decoder_vocab_size": 89,
    "share_encoder_decoder_embeddings": False,
    "d_model": 24,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 40,
    "decoder_ffn_dim": 36,
    "max_position_embeddings": 16,
}
# Two models have all that a configuration can ask for.
SINUSOIDS = {"position_encoding": "fairseq", "head_dim": 5, "value_head_dim": 7, "pad_token_id": 3}
LEARNED = {
    "position_encoding": "learned",
    "norm_position": "pre",
    "final_layer_norm": True,
    "layer_norm_eps": 0.1,
    "attention_bias": True,
    "output_bias": True,
    "scale_embedding": False,
    "tie_word_embeddings": False,
    "activation_function": "swish",
}


def make_model(**fields):
    """Large random weights, so that the output depends on each; a new activation in each layer unless one is given."""
    model = VanillaTransformerForConditionalGeneration(VanillaTransformerConfig(**{**SIZES, **fields})).eval()
    layers = [*model.model.encoder.layers, *model.model.decoder.layers]
    if "activation_function" not in fields:
        for layer, name in zip(layers, ("gelu_new", "quick_gelu", "relu"), strict=True):
            layer.feed_forward.activation = ACT2FN[name]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter += 0.3 * torch.randn_like(parameter)
            elif "layers" in name:
                parameter *= 4 if "encoder_attn" in name else 2
    return model


class NoTokenizer:
    def save_pretrained(self, folder):
        pass


class Graphs:
    """The two graphs of a folder, as another program runs them."""

    def __init__(self, folder, end=""):
        names = ("encoder_model", "decoder_model_merged")
        self.encoder, self.decoder = (onnxruntime.InferenceSession(folder / f"{one}{end}.onnx") for one in names)

    def encode(self, ids, mask):
        return self.encoder.run(None, {"input_ids": np.asarray(ids), "attention_mask": np.asarray(mask)})[0]

    def decode(self, memory, mask, target, past=None):
        """Logits and the next past; without one, the decoder is given a past of no positions."""
        inputs = {"encoder_hidden_states": memory, "encoder_attention_mask": mask, "input_ids": target}
        for one in self.decoder.get_inputs():
            if one.name.startswith("past"):
                empty = np.zeros((len(target), one.shape[1], 0, one.shape[3]), "f4")
                inputs[one.name] = past[one.name] if past else empty
        inputs["use_cache_branch"] = [past is not None]
        names = [one.name for one in self.decoder.get_outputs()]
        inputs = {name: np.asarray(one) for name, one in inputs.items()}
        found = dict(zip(names, self.decoder.run(names, inputs), strict=True))
        return found.pop("logits"), {name.replace("present", "past_key_values"): one for name, one in found.items()}

    def logits(self, ids, mask, target, first, step):
        """The decoder's `first` positions, and then `step` at a time; a past makes the encoder's output unread."""
        memory, found, past = self.encode(ids, mask), [], None
        for begin, end in itertools.pairwise([0, *range(first, target.shape[1], step), target.shape[1]]):
            logits, past = self.decode(memory * (not past), mask, target[:, begin:end], past)
            found.append(torch.from_numpy(logits))
        return torch.cat(found, dim=1)

    def greedy(self, ids, start, limit):
        mask, found, past = np.ones((1, len(ids)), np.int64), [start], None
        memory = self.encode([ids], mask)
        while len(found) <= limit and found[-1] != 2:
            logits, past = self.decode(memory, mask, np.array([found[-1:]]), past)
            found.append(int(logits[0, -1].argmax()))
        return found


def example(model, batch, source, target):
    """Ids, a mask with padding on both sides, and a target."""
    config = model.config
    ids = torch.randint(4, config.vocab_size, (batch, source))
    mask = torch.ones_like(ids)
    for row in range(1, batch):
        mask[row, : row % 3], mask[row, source - row % 2 :] = 0, 0
    return (
        ids.masked_fill(mask == 0, config.pad_token_id),
        mask,
        torch.randint(4, config.target_vocab_size, (batch, target)),
    )


def compare(model, graphs, sizes, tolerance):
    for batch, source, target in sizes:
        ids, mask, labels = example(model, batch, source, target)
        with torch.no_grad():
            expected = model(input_ids=ids, attention_mask=mask, decoder_input_ids=labels).logits
        for first, step in {(target, 1), (1, 1), (max(target - 3, 1), 2)}:
            found = graphs.logits(ids, mask, labels, first, step)
            torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """A model in bfloat16, and its graphs with weights in files beside them, as above 2 GB."""
    place = tmp_path_factory.mktemp("both")
    torch.manual_seed(0)
    model, steps = make_model(**SINUSOIDS, activation_function="relu").to(torch.bfloat16), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exporter, "LARGEST", 0)
        notes = exporter.write_onnx(model, NoTokenizer(), place, steps.append)
    assert steps == ["encoder_model", "decoder_model_merged", "comparison"]
    return model, place, notes


@pytest.mark.hard
def test_graphs_with_sinusoids_have_no_longest_input(both):
    """Nor are sinusoids rounded as the weights are."""
    model, place, notes = both
    assert not any("positions end" in note for note in notes)
    graphs, exact = Graphs(place), VanillaTransformerForConditionalGeneration(model.config).eval()
    exact.load_state_dict(model.state_dict())
    model = exact
    compare(model, graphs, [(1, 1, 1), (1, 6, 4), (5, 9, 7), (3, 33, 41)], 1e-4)
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
    assert json.loads((place / "config.json").read_text())["position_encoding"] == "fairseq"
    assert (place / "generation_config.json").is_file()


@pytest.fixture(scope="module")
def exported(tiny_checkpoint, tmp_path_factory):
    """A checkpoint in bfloat16 with a tokenizer, and what the command makes of it, with what it says."""
    place = tmp_path_factory.mktemp("onnx")
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoint)
    rows = {"vocab_size": len(tokenizer) + 5, "decoder_vocab_size": len(tokenizer) + 3}
    make_model(**LEARNED | rows).to(torch.bfloat16).save_pretrained(place / "model")
    tokenizer.save_pretrained(place / "model")
    command = ["export", "--model", str(place / "model"), "--to", "onnx", "--output", str(place / "out")]
    with contextlib.redirect_stdout(io.StringIO()) as said:
        assert cli.main(command) in (0, None)
    return place / "model", place / "out", said.getvalue()


@pytest.mark.slow
def test_graphs_with_learned_positions_of_a_model_in_bfloat16(exported):
    checkpoint, output, said = exported
    assert said.startswith(f"exported {checkpoint} into {output}\nnote: in float32, logits differ ")
    assert "note: the weights were bfloat16 and are float32 now\n" in said
    assert "note: positions end at 16: longer inputs are an error in onnxruntime\n" in said
    model = VanillaTransformerForConditionalGeneration.from_pretrained(checkpoint)
    assert model.dtype == torch.bfloat16
    graphs, model = Graphs(output), model.float()
    compare(model, graphs, [(1, 1, 1), (4, 16, 16)], 1e-4)
    ids, mask, target = example(model, 1, 16, 17)
    with pytest.raises(Exception, match=r"out of data bounds|indices element"):
        graphs.logits(ids, mask, target, 16, 1)
    with pytest.raises(Exception, match=r"out of data bounds|indices element"):
        graphs.encode(torch.cat([ids, ids], dim=1), torch.ones(1, 32, dtype=torch.long))


@pytest.mark.slow
def test_weights_beside_the_graphs(both):
    _, place, _ = both
    assert sorted(file.name for file in place.iterdir() if "onnx" in file.name) == sorted(
        f"{name}.onnx{end}" for name in ("encoder_model", "decoder_model_merged") for end in ("", ".data")
    )


def types_in(graph):
    """The types of all values of a graph, those of its branches, constants and casts too."""
    values = [*graph.input, *graph.output, *graph.value_info]
    found = {one.type.tensor_type.elem_type for one in values} | {one.data_type for one in graph.initializer}
    for attribute in (one for node in graph.node for one in node.attribute):
        found |= {attribute.i} if attribute.name in ("to", "dtype") else set()
        found |= {attribute.t.data_type} if attribute.HasField("t") else set()
        found |= types_in(attribute.g) if attribute.HasField("g") else set()
    return found


@pytest.mark.slow
def test_nothing_is_in_double_precision(both, exported):
    """Which the runtime that transformers.js loads into a browser lacks."""
    for file in (*both[1].glob("*.onnx"), *exported[1].glob("*.onnx")):
        types = types_in(onnx.load(file, load_external_data=False).graph)
        assert onnx.TensorProto.FLOAT in types
        assert onnx.TensorProto.DOUBLE not in types


TEXTS = ["twenty-one", "half past nine", "", "  ", "drei Euro", "</s> <pad>", "日本 x"]


@pytest.mark.slow
def test_the_script_needs_no_torch(exported):
    checkpoint, output, _ = exported
    model = VanillaTransformerForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32)
    model.generation_config.update(max_new_tokens=5, bad_words_ids=[[9], [11]], forced_eos_token_id=2)
    model.generation_config.save_pretrained(output)
    expected = Translator(model, "cpu", tokenizer=AutoTokenizer.from_pretrained(checkpoint))(TEXTS, num_beams=1)
    blocked = "import sys; sys.modules |= dict.fromkeys(['torch', 'transformers']); sys.argv = sys.argv[1:]; "
    command = [sys.executable, "-c", f"{blocked}exec(open(sys.argv[0]).read())", str(SCRIPT), str(output)]
    done = subprocess.run(command, input="\n".join(TEXTS) + "\n", capture_output=True, text=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "".join(f"{text}\n" for text in expected)
    assert len({*expected}) > 2


@pytest.mark.hard
def test_the_script_reads_opus_mt_models(tmp_path):
    convert(opus_mt_folder(tmp_path / "opus", separate_vocabs=True), tmp_path / "ours")
    command = ["export", "--model", str(tmp_path / "ours"), "--to", "onnx", "--output", str(tmp_path / "onnx")]
    assert cli.main(command) == 0
    texts = ["A man is riding a bicycle.", "", "It costs 3.50 euros, or 1,000 in total!", "日本"]
    expected = Translator(tmp_path / "ours", "cpu")(texts, num_beams=1, max_new_tokens=8)
    settings = json.loads((tmp_path / "onnx" / "generation_config.json").read_text()) | {"max_new_tokens": 8}
    (tmp_path / "onnx" / "generation_config.json").write_text(json.dumps(settings))
    command = [sys.executable, str(SCRIPT), str(tmp_path / "onnx")]
    done = subprocess.run(command, input="\n".join(texts) + "\n", capture_output=True, text=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "".join(f"{text}\n" for text in expected)


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
def test_graphs_that_compute_something_else_are_refused(both, tmp_path, monkeypatch, error):
    model, place, _ = both
    logits = exporter._logits_of_graphs
    monkeypatch.setattr(exporter, "_logits_of_graphs", lambda *arguments: logits(*arguments) + error)
    monkeypatch.setattr(exporter, "write_graphs", lambda *_: shutil.copytree(place, tmp_path, dirs_exist_ok=True))
    with pytest.raises(ConversionError, match="onnxruntime's logits differ from the model's by"):
        exporter.write_onnx(model, NoTokenizer(), tmp_path)
