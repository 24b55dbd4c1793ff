"""Stock models with graphs for the browser: the same logits in onnxruntime, the same ids and outputs in JavaScript."""

import json
import os
import shutil
import subprocess

import numpy as np
import pytest
import torch
from test_onnx import Graphs, types_in
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from hf_vanilla_transformer import (
    VanillaTransformerConfig,
    VanillaTransformerForConditionalGeneration,
    VanillaTransformerTokenizerFast,
    cli,
)
from hf_vanilla_transformer.data.symbols import train_tokenizer
from hf_vanilla_transformer.interop.interface import ConversionError
from scripts.quickstart.corpus import generate_pairs

onnx = pytest.importorskip("onnx", reason="onnx isn't installed")
onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime isn't installed")
pytest.importorskip("onnxscript", reason="onnxscript isn't installed")
from hf_vanilla_transformer.interop import onnx as exporter  # noqa: E402
from hf_vanilla_transformer.interop import transformers_js  # noqa: E402

PACKAGE = "@huggingface/transformers@4.3.2"
PAIRS = [{"source": source, "target": target} for source, target in generate_pairs(1000)]
ODD = [
    "", " ", "  ", "a", " a", "  a ", "a\n\n b", "\ta", ", a,b , .", "“Hi”, he  said …", "e\u0301 é", "日本 語。", "<s",
    "👩\u200d👩\u200d👧 x", "a\u00a0b\u3000c", "a\u0085b", "\ufeffa \ufeff", "x" * 300, "😀" * 300, "a b, " * 99,
    "\x00a\rb", "$5 + ^~`|", "İ ß ﬁ",
]  # fmt: skip
CONTROL = ["</s>", "x </s>y", "<pad>abc <s>"]  # tokens in JavaScript
SIZES = {
    "d_model": 32, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 40, "decoder_ffn_dim": 36, "max_position_embeddings": 64,
}  # fmt: skip
PRE = {"norm_position": "pre", "final_layer_norm": True}
# Fields of a configuration, the class, and the kind of tokenizer.
KINDS = [
    ({}, "MarianMTModel", "bpe"),
    ({**PRE, "output_bias": True}, "BlenderbotForConditionalGeneration", "words"),
    ({**PRE, "position_encoding": "fairseq", "attention_bias": True}, "M2M100ForConditionalGeneration", "characters"),
]


def trained(fields, kind, steps):
    """A model that has learned a little, so that outputs depend on all that it reads, and its tokenizer."""
    torch.manual_seed(0)
    tokenizer = train_tokenizer(PAIRS, [kind], vocab_size=600)
    model = VanillaTransformerForConditionalGeneration(
        VanillaTransformerConfig(vocab_size=len(tokenizer), dropout=0.0, **SIZES, **fields)
    )
    model.generation_config.max_new_tokens = 20
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(steps):
        some = PAIRS[step * 16 % 960 :][:16]
        options = {"padding": True, "truncation": True, "max_length": 60, "return_tensors": "pt"}
        batch = tokenizer([one["source"] for one in some], **options)
        labels = tokenizer(text_target=[one["target"] for one in some], **options)["input_ids"]
        model(**batch, labels=labels.masked_fill(labels == 0, -100)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval(), tokenizer


@pytest.fixture(
    scope="module",
    params=[KINDS[0], *(pytest.param(one, marks=pytest.mark.hard) for one in KINDS[1:])],
    ids=[kind for _, _, kind in KINDS],
)
def exported(request, tmp_path_factory):
    return export(*request.param, tmp_path_factory.mktemp("transformers_js"))


def export(fields, name, kind, place, steps=60):
    """A model, its tokenizer, and what the command makes of them."""
    model, tokenizer = trained(fields, kind, steps)
    for one in (model, tokenizer):
        one.save_pretrained(place / "model")
    command = ["export", "--model", str(place / "model"), "--to", "stock", "--onnx", "--output", str(place / "out")]
    assert cli.main(command) == 0
    assert json.loads((place / "out" / "config.json").read_text())["architectures"] == [name]
    return model, tokenizer, place / "out"


@pytest.mark.slow
def test_the_merged_decoder_computes_both_branches(exported):
    model, tokenizer, folder = exported
    graphs, stock = Graphs(folder / "onnx"), AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
    batch = tokenizer([one["source"] for one in PAIRS[:5]], padding=True, return_tensors="pt")
    target = torch.randint(3, model.config.vocab_size, (5, 9))
    with torch.no_grad():
        ours, theirs = (one(**batch, decoder_input_ids=target, use_cache=False).logits for one in (model, stock))
    found = graphs.logits(batch["input_ids"], batch["attention_mask"], target, 2, 3)
    for expected in (ours, theirs):
        torch.testing.assert_close(found, expected, atol=1e-4 * float(ours.abs().max()), rtol=0)


@pytest.mark.slow
def test_weights_are_there_once(exported):
    model, _, folder = exported
    names = [f"{name}{end}.onnx" for name in ("decoder_model_merged", "encoder_model") for end in ("", "_quantized")]
    assert sorted(file.name for file in (folder / "onnx").iterdir()) == names
    graph = onnx.load(folder / "onnx" / "decoder_model_merged.onnx").graph
    branches = [attribute.g for attribute in graph.node[0].attribute]
    assert [len(one.initializer) for one in branches] == [0, 0]
    decoder = sum(one.numel() for one in {*model.model.decoder.parameters(), *model.lm_head.parameters()})
    sinusoids = 2 * exporter.SPAN * SIZES["d_model"]
    weights = sum(np.prod(one.dims) for one in graph.initializer if one.data_type == 1) - sinusoids
    assert decoder * 0.9 < weights < decoder * 1.2  # a small matrix may be there transposed, too
    for file in (folder / "onnx").iterdir():
        graph = onnx.load(file).graph
        found, types = graph.initializer, types_in(graph)
        assert onnx.TensorProto.FLOAT in types
        assert onnx.TensorProto.DOUBLE not in types
        in_float32 = [one.name for one in found if one.data_type == 1 and len(one.dims) == 2]
        assert bool(in_float32) is not file.stem.endswith("_quantized"), in_float32
        assert b'File "' not in file.read_bytes()  # stack traces of this machine


# ---- Tokenizer ----
def tokenizers():
    texts = [one["source"] for one in PAIRS] + ["a street . , and (x) </s"]
    for merge_punctuation in (True, False):
        yield VanillaTransformerTokenizerFast.train_from_iterator(
            texts, vocab_size=500, merge_punctuation=merge_punctuation, show_progress=False
        )
    for kind in ("words", "characters", "bytes"):
        yield train_tokenizer(PAIRS, [kind], vocab_size=500)


def test_ids_stay_in_python(tmp_path):
    for number, tokenizer in enumerate(tokenizers()):
        own = transformers_js._for_javascript(tokenizer)
        own.save_pretrained(tmp_path / str(number))
        texts = [*ODD, *CONTROL, *(text for one in PAIRS for text in one.values())]
        expected = tokenizer(texts)["input_ids"]
        assert own(texts)["input_ids"] == expected
        assert AutoTokenizer.from_pretrained(tmp_path / str(number))(texts)["input_ids"] == expected
        assert own.batch_decode(expected) == tokenizer.batch_decode(expected)
        parts = json.loads(own.backend_tokenizer.to_str())["pre_tokenizer"]
        assert not any(name in str(parts) for name in ("Metaspace", "FixedLength", "Merged"))  # JavaScript has others
        assert isinstance(own, VanillaTransformerTokenizerFast) is isinstance(
            tokenizer, VanillaTransformerTokenizerFast
        )


def test_tokenizers_that_javascript_reads_otherwise_are_refused(tmp_path):
    tagged = next(tokenizers())
    tagged.add_special_tokens({"extra_special_tokens": ["<2de>"]})
    features = train_tokenizer([{"source": "a\tV;PST", "target": "b"}], ["words", "words"], features=True)
    for tokenizer in (train_tokenizer(PAIRS, ["graphemes"]), tagged, features):
        model = VanillaTransformerForConditionalGeneration(VanillaTransformerConfig(vocab_size=len(tokenizer), **SIZES))
        with pytest.raises(
            ConversionError,
            match=f"transformers.js would have other ids than its tokenizer, {type(tokenizer).__name__}:",
        ):
            transformers_js.write_transformers_js(model, tokenizer, tmp_path)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("fields", "largest", "message"),
    [
        ({"position_encoding": "fairseq"}, None, "transformers.js has no FSMT"),
        ({}, 4_000, "its weights have more than 4,000 bytes"),
    ],
)
def test_what_transformers_js_cannot_open_is_refused(fields, largest, message, tmp_path, monkeypatch):
    tokenizer = train_tokenizer(PAIRS, ["bytes"])
    model = VanillaTransformerForConditionalGeneration(VanillaTransformerConfig(vocab_size=300, **SIZES, **fields))
    if largest:
        monkeypatch.setattr(transformers_js, "LARGEST", largest)
    with pytest.raises(ConversionError, match=message):
        transformers_js.write_transformers_js(model, tokenizer, tmp_path)
    assert not any(tmp_path.iterdir())


def test_the_option_is_for_stock(vanilla_transformer, tmp_path):
    code, _, err = vanilla_transformer(
        *("export", "--model", tmp_path, "--to", "ctranslate2", "--onnx", "--output", tmp_path / "out")
    )
    assert (code, "--onnx is for --to stock, not ctranslate2; leave it out" in err) == (2, True)
    code, _, err = vanilla_transformer("push", tmp_path, "me/model", "--onnx")
    assert (code, "--onnx is for --as stock; add that, or leave --onnx out" in err) == (2, True)


# ---- JavaScript ----
PROGRAM = """
import { AutoModelForSeq2SeqLM, AutoTokenizer, env } from "@huggingface/transformers";
import fs from "fs";
const [place, input, output] = process.argv.slice(2);
env.localModelPath = place;
env.allowRemoteModels = false;
const { corpus, texts, limit } = JSON.parse(fs.readFileSync(input));
const tokenizer = await AutoTokenizer.from_pretrained("out");
const decode = (ids) => tokenizer.decode(ids, { skip_special_tokens: true });
const ids = corpus.map((text) => tokenizer.encode(text));
const found = { ids, texts: ids.map(decode) };
for (const dtype of ["fp32", "q8"]) {
  const model = await AutoModelForSeq2SeqLM.from_pretrained("out", { dtype });
  found[dtype] = [];
  for (const text of texts) {
    const ids = await model.generate({ ...tokenizer(text), max_new_tokens: limit, num_beams: 1 });
    found[dtype].push(ids.tolist()[0].map(Number));
  }
}
fs.writeFileSync(output, JSON.stringify(found));
"""


def install(place):
    """Installs transformers.js in a folder."""
    if shutil.which("npm") is None:
        pytest.skip("npm isn't installed, so transformers.js wasn't tried")
    command = ["npm", "install", "--no-audit", "--no-fund", PACKAGE]
    environment = os.environ | {"ONNXRUNTIME_NODE_INSTALL_CUDA": "skip"}  # it would fetch CUDA's libraries
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=place, env=environment)
    if done.returncode:
        pytest.skip(f"npm can't install transformers.js, so it wasn't tried: {done.stderr[-300:]}")


@pytest.fixture(scope="module")
def javascript(tmp_path_factory):
    """A folder in which node finds transformers.js."""
    place = tmp_path_factory.mktemp("javascript")
    install(place)
    (place / "program.mjs").write_text(PROGRAM, encoding="utf-8")
    return place


@pytest.mark.peers
@pytest.mark.timeout(1_800)
def test_ids_and_outputs_in_javascript(exported, javascript, tmp_path):
    model, tokenizer, folder = exported
    corpus = [one["source"] for one in PAIRS] + ODD[1:]
    texts = [one["source"] for one in PAIRS[::50]]
    job = {"corpus": corpus, "texts": texts, "limit": 20}
    (tmp_path / "input.json").write_text(json.dumps(job))
    command = ["node", "program.mjs", f"{folder.parent}/", str(tmp_path / "input.json"), str(tmp_path / "output.json")]
    subprocess.run(command, cwd=javascript, check=True)
    found = json.loads((tmp_path / "output.json").read_text(encoding="utf-8"))
    expected = tokenizer(corpus)["input_ids"]
    assert found["ids"] == expected
    assert found["texts"] == tokenizer.batch_decode(expected, skip_special_tokens=True)
    start, ids = model.generation_config.decoder_start_token_id, tokenizer(texts)["input_ids"]
    ours = [model.generate(torch.tensor([one]), num_beams=1, max_new_tokens=20)[0].tolist() for one in ids]
    assert found["fp32"] == ours
    assert len({*map(tuple, ours)}) > 5
    graphs = Graphs(folder / "onnx", "_quantized")
    assert found["q8"] == [graphs.greedy(one, start, 20) for one in ids]
