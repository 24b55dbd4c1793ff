"""Models in CTranslate2's format as ours: log-probabilities beside CTranslate2's own, and the way back."""

import json
import math
import struct

import ctranslate2
import pytest
import sentencepiece
import torch
from ctranslate2.specs import transformer_spec

from hf_vanilla_transformer import Translator
from hf_vanilla_transformer.checkpoints.loading import load_checkpoint
from hf_vanilla_transformer.interop import ctranslate2_folder
from hf_vanilla_transformer.interop.convert import convert, recognise
from hf_vanilla_transformer.interop.ctranslate2_files import TYPES, Folder, unpacked
from hf_vanilla_transformer.interop.export import export
from hf_vanilla_transformer.interop.interface import ConversionError, ConversionOptions
from tests.interop.ctranslate2_origins import ALL, ORIGINS, argos, fairseq, opennmt, opus_mt, sharpened

WITHOUT = ConversionOptions(with_tokenizer=False)
# Sinusoids that half precision has rounded in the file are exact in the converted model.
TOLERANCES = {None: 1e-4, "int8": 1e-3, "int16": 1e-3, "float16": 5e-3, "bfloat16": 5e-2}


def worst_difference(folder, model, pairs=20):
    """How far log-probabilities per token of random tokens are from CTranslate2's."""
    reader, chance = Folder.read(folder), torch.Generator().manual_seed(0)
    source, target = reader.vocabularies
    rows = [
        [torch.randint(4, len(own), (length,), generator=chance).tolist() for own in (source, target)]
        for length in torch.randint(1, 25, (pairs,), generator=chance).tolist()
    ]
    end = [reader.settings["eos_token"]] if reader.source_ends else []
    given = [] if reader.settings["add_source_eos"] else end
    theirs = ctranslate2.Translator(str(reader.weights.parent), compute_type="float32").score_batch(
        [[source[one] for one in row[0]] + given for row in rows], [[target[one] for one in row[1]] for row in rows]
    )
    worst = 0.0
    for (one, other), expected in zip(rows, theirs, strict=True):
        inputs = torch.tensor([one + [source.index(token) for token in end]])
        begun = torch.tensor([[model.config.decoder_start_token_id, *other]])
        with torch.no_grad():
            logits = model.float()(input_ids=inputs, decoder_input_ids=begun).logits.log_softmax(-1)[0]
        found = logits[range(len(other) + 1), [*other, model.config.eos_token_id]]
        worst = max(worst, (found - torch.tensor(expected.log_probs)).abs().max().item())
    return worst


@pytest.mark.parametrize("name", ORIGINS)
def test_log_probabilities(name, tmp_path):
    for quantization, tolerance in TOLERANCES.items():
        place = tmp_path / str(quantization)
        place.mkdir()
        folder = ORIGINS[name](place, quantization)
        assert recognise(folder) == "ctranslate2"
        made = ctranslate2_folder.load(folder, WITHOUT)
        assert worst_difference(folder, made.model) < tolerance
        assert [f"stored as {quantization}" in note for note in made.notes] == [True] * (
            quantization in ("int8", "int16")
        )


VARIANTS = {
    "pre-norm": lambda place: fairseq(place, encoder_normalize_before=True, decoder_normalize_before=True),
    "tied": lambda place: fairseq(place, share_all_embeddings=True),
    "post-norm of Marian": lambda place: opus_mt(
        place, share_encoder_decoder_embeddings=True, activation_function="relu"
    ),
    "biases": lambda place: opennmt(place, biased=True),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants(variant, tmp_path):
    folder = VARIANTS[variant](tmp_path)
    assert worst_difference(folder, ctranslate2_folder.load(folder, WITHOUT).model) < 1e-4


@pytest.mark.parametrize("positions", ["computed", "learned"])
def test_positions(positions, tmp_path):
    """CTranslate2 computes those that a file lacks, from 1 up; any other table is learned."""
    folder = opennmt(tmp_path)
    change_variables(folder, lambda name: positions == "computed" and name.endswith("/encodings"))
    if positions == "learned":
        at = Folder.read(folder).variables["decoder/position_encodings/encodings"].offset
        content = bytearray((folder / "model.bin").read_bytes())
        content[at : at + 4] = struct.pack("<f", 0.5)
        (folder / "model.bin").write_bytes(content)
    model = ctranslate2_folder.load(folder, WITHOUT).model
    assert model.config.position_encoding == "learned"
    assert worst_difference(folder, model) < 1e-4


def test_files_of_earlier_versions(tmp_path):
    """Version 5 has the settings of config.json, and one number of heads for both stacks, among the variables."""
    folder = opennmt(tmp_path)
    wanted = ctranslate2_folder.load(folder, WITHOUT).model
    config = json.loads((folder / "config.json").read_text())
    change_variables(folder, lambda name: False, version=5)
    assert config["decoder_start_token"] == "<s>"
    (folder / "config.json").unlink()
    made = ctranslate2_folder.load(folder, WITHOUT).model
    assert made.config.layer_norm_eps == 1e-5
    for name, value in wanted.state_dict().items():
        assert torch.equal(made.state_dict()[name], value), name


def change_variables(folder, leaves_out, version=6):
    """Writes model.bin without some variables, and without aliases."""
    content, variables = (folder / "model.bin").read_bytes(), Folder.read(folder).variables
    kept = {name: one for name, one in variables.items() if not leaves_out(name)}
    header = content[4 : 4 + 2 + len("TransformerSpec") + 1 + 4]
    parts = [struct.pack("<I", version), header, struct.pack("<I", len(kept))]
    for name, one in kept.items():
        size = math.prod(one.shape) * TYPES[one.dtype][0]
        parts += [struct.pack("<H", len(name) + 1), name.encode(), struct.pack("<xB", len(one.shape))]
        parts.append(struct.pack(f"<{len(one.shape)}IBI", *one.shape, [*TYPES].index(one.dtype), size))
        parts.append(content[one.offset : one.offset + size])
    (folder / "model.bin").write_bytes(b"".join([*parts, struct.pack("<I", 0)]))


# ---- What isn't converted ----
SPECS = {
    "layernorm_embedding": {"layernorm_embedding": True},
    "relative_position_keys": {"with_relative_position": True},
    "linear_0_noact": {"ffn_glu": True},
    "RMSNorm": {"rms_norm": True},
    "num_heads_kv": {"multi_query_attention": True},
    "embeddings_1": {"num_source_embeddings": 2},
}


@pytest.mark.parametrize("what", SPECS)
def test_other_models_are_refused(what, tmp_path):
    spec = transformer_spec.TransformerSpec.from_config((1, 1), 2, **SPECS[what])
    fill(spec)
    spec.decoder.projection.weight = torch.randn(6, 8).numpy()
    for side in ("source", "target"):
        for _ in range(SPECS[what].get("num_source_embeddings", 1) if side == "source" else 1):
            getattr(spec, f"register_{side}_vocabulary")(["<blank>", "<s>", "</s>", "<unk>", "a", "b"])
    spec.validate()
    spec.save(str(tmp_path))
    with pytest.raises(ConversionError, match=what):
        ctranslate2_folder.load(tmp_path, WITHOUT)


def fill(spec):
    """Random weights of the width 8."""
    for name, value in vars(spec).items():
        if isinstance(value, list):
            for one in value:
                fill(one)
        elif hasattr(value, "__dict__") and not isinstance(value, (int, float)) and not name.startswith("_"):
            fill(value)
        elif value is None:
            kind = type(spec).__name__
            shape = {"LinearSpec": (8, 8), "EmbeddingsSpec": (6, 8)}.get(kind, (8,))
            setattr(spec, name, torch.randn(shape).numpy())


def test_damaged_files(tmp_path):
    folder = opennmt(tmp_path)
    content = (folder / "model.bin").read_bytes()
    (folder / "model.bin").write_bytes(content[:-100_000] if len(content) > 200_000 else content[: len(content) // 2])
    with pytest.raises(ConversionError, match=r"model\.bin is damaged"):
        ctranslate2_folder.load(folder, WITHOUT)
    (folder / "model.bin").write_bytes(content)
    tokens = json.loads((folder / "shared_vocabulary.json").read_text())
    (folder / "shared_vocabulary.json").write_text(json.dumps([*tokens, "another"]))
    with pytest.raises(
        ConversionError,
        match=rf"shared_vocabulary.json .* has {len(tokens) + 1} tokens, and encoder/\S+ {len(tokens)} rows",
    ):
        ctranslate2_folder.load(folder, WITHOUT)


# ---- Everything goes on ----
GREEDY = {"unknown_target": "drop", "max_new_tokens": 30, "num_beams": 1}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Models of all origins, and what `convert` makes of them."""
    made = {}
    for name in [*ORIGINS, "argos"]:
        place = tmp_path_factory.mktemp(name)
        folder = argos(place) if name == "argos" else sharpened(ORIGINS[name](place))
        notes = convert(folder, place / "converted")
        assert any("int8" in note for note in notes) == (name == "argos")
        made[name] = folder, place / "converted"
    return made


@pytest.mark.parametrize("name", [*ORIGINS, "argos"])
def test_converted_models_translate_as_before_and_go_out_again(name, folders, tmp_path):
    folder, converted = folders[name]
    original = Translator(folder, "cpu", compute_type="float32")
    assert Translator(converted, "cpu")(ALL, **GREEDY) == original(ALL, **GREEDY)
    tokenizer, model = load_checkpoint(converted)
    quantization = "int8" if name == "argos" else None
    export(model, tmp_path / "exported", to="ctranslate2", tokenizer=tokenizer, quantization=quantization)
    with unpacked(folder) as place:
        theirs, ours = (stored(Folder.read(one)) for one in (place, tmp_path / "exported"))
    for tensor, value in theirs.items():  # a row of <pad> and longer tables of positions are added at the end
        own = ours[tensor]
        grows = tensor.endswith("/encodings") or "embeddings" in tensor or "projection" in tensor
        assert own.shape == value.shape or (grows and own.shape[1:] == value.shape[1:]), tensor
        own = own[: len(value)]
        if tensor.endswith("_scale"):  # 127 / largest, of a largest that was computed as 127 / scale
            assert torch.allclose(own, value, rtol=2**-22, atol=0), tensor
        elif tensor.endswith("/encodings"):  # computed in another order
            assert torch.allclose(own, value, rtol=0, atol=1e-4), tensor
        else:
            assert torch.equal(own, value), tensor
    # Biases that their model doesn't have.
    added = {tensor: ours[tensor] for tensor in ours.keys() - theirs.keys()}
    assert {tensor: value for tensor, value in added.items() if value.any()} == {}, added.keys()


def stored(folder):
    """The numbers in a file as they are, with the scales of 8 bits."""
    content, found = folder.weights.read_bytes(), {}
    for name, one in folder.variables.items():
        if one.shape:
            dtype = getattr(torch, one.dtype)
            size = math.prod(one.shape) * dtype.itemsize
            buffer = bytearray(content[one.offset : one.offset + size])
            found[name] = torch.frombuffer(buffer, dtype=dtype).reshape(one.shape)
    return found


@pytest.mark.parametrize(("name", "kind"), [("opus_mt", "MarianMTModel"), ("argos", "PegasusForConditionalGeneration")])
def test_models_go_to_transformers(name, kind, folders, tmp_path):
    """Whose own classes give CTranslate2's tokens."""
    folder, converted = folders[name]
    tokenizer, model = load_checkpoint(converted)
    notes = export(model, tmp_path / "stock", to="stock", tokenizer=tokenizer)
    assert any("append eos_token_id to labels" in note for note in notes) == (name == "argos")
    own, model = load_checkpoint(tmp_path / "stock")
    assert type(model).__name__ == kind
    batch = own(ALL[:20], padding=True, return_tensors="pt", return_token_type_ids=False)
    rows = model.generate(**batch, num_beams=1, max_new_tokens=30)
    with unpacked(folder) as place:
        reader = Folder.read(place)
        file = "source.spm" if name == "opus_mt" else "sentencepiece.model"
        spm = sentencepiece.SentencePieceProcessor(str(reader.places[-1] / file))
        end = ["</s>"] if name == "opus_mt" else []
        library = ctranslate2.Translator(str(reader.weights.parent), compute_type="float32")
        pieces = [spm.encode(text, out_type=str) + end for text in ALL[:20]]
        wanted = library.translate_batch(pieces, beam_size=1, max_decoding_length=30)
    special = {"<pad>", "<blank>", "<s>", "</s>"}
    found = [[token for token in own.convert_ids_to_tokens(row) if token not in special] for row in rows]
    assert found == [[token for token in one.hypotheses[0] if token not in special] for one in wanted]
    assert len({*map(str, found)}) > 3
    assert own.batch_decode(rows, skip_special_tokens=True) == Translator(converted, "cpu")(ALL[:20], **GREEDY)


def test_converted_models_are_explained_and_trained(folders, tmp_path, vanilla_transformer):
    _, converted = folders["argos"]
    code, _, error = vanilla_transformer("explain", "--model", converted, "--output", tmp_path / "page.html")
    assert (code, (tmp_path / "page.html").is_file()) == (0, True), error
    tokenizer, model = load_checkpoint(converted)
    batch = tokenizer(ALL[:2], text_target=ALL[2:4], padding=True, return_tensors="pt")
    batch["labels"][batch["labels"] == tokenizer.pad_token_id] = -100
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    for _ in range(3):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] > losses[1] > losses[2]
