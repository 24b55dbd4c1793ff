"""`compute_type="compiled"`: the step as a function of tensors, and which programs are made of it.

The compiler itself and the folder of programs: tests/hard/test_compiled_programs.py.
"""

import logging
import re
from unittest import mock

import pytest
import torch
from test_generation import EOS, SOURCES, lively_model, padded
from test_incremental import CLOSE, MODELS, cut, ensemble_of, forced, members, varied, wander
from test_search import by_us

from hf_vanilla_transformer.engine import program_cache
from hf_vanilla_transformer.engine.cpu import CPU
from hf_vanilla_transformer.engine.decoding import compiled as compiled_module
from hf_vanilla_transformer.engine.decoding.compiled import (
    CompiledDecoder,
    DecoderStep,
    _fingerprint,
    program_of,
)
from hf_vanilla_transformer.engine.decoding.incremental import IncrementalDecoder
from hf_vanilla_transformer.engine.decoding.prepared import weights_of
from hf_vanilla_transformer.engine.decoding.weights import Weights

OPTIONS = [
    {"num_beams": 1},
    {"num_beams": 1, "suppress_tokens": [EOS], "max_extra_length": 40},  # more than the caches have room for at first
    {"num_beams": 3, "num_return_sequences": 2},
    {"num_beams": 3, "coverage_penalty": 0.2, "output_alignments": True},
]


@pytest.fixture
def uncompiled(monkeypatch):
    """Takes the function itself in place of what the compiler would make of it."""

    def take(weights, rows):
        step = DecoderStep(weights)
        return lambda inputs: list(step(*inputs))

    monkeypatch.setattr(compiled_module, "program_of", take)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where programs are kept."""
    monkeypatch.setenv("HF_VANILLA_TRANSFORMER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "programs"


@torch.no_grad()
def assert_is_the_models(model, rows, beams, steps):
    """Steps beyond the 32 positions of caches, as rows are exchanged and sentences leave, compute what modules do."""
    inputs = padded(rows, "left")
    memory, mask = model.get_encoder()(**inputs)[0], inputs["attention_mask"]
    settings = (memory, mask, beams, True)
    found, expected = (
        wander(decoder, model.config.target_vocab_size, len(rows), steps, beams, keep_attention=True)
        for decoder in (
            CompiledDecoder(weights_of(model, "compiled"), *settings),
            IncrementalDecoder(weights_of(model), *settings),
        )
    )
    assert len(found) == beams * len(rows)
    for (i, tokens, logits, attention), (*_, wanted) in zip(found, expected, strict=True):
        # By default, modules take padding at the beginning, which may be drawn here, for padding on the left.
        shown = {"decoder_attention_mask": torch.ones(1, len(tokens), dtype=torch.long)}
        modules = forced(model, cut(inputs, i), tokens, **shown).logits[0]
        torch.testing.assert_close(torch.stack(logits), modules, **CLOSE[torch.float32])
        torch.testing.assert_close(torch.stack(attention), torch.stack(wanted), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.usefixtures("uncompiled")
def test_the_step_is_the_models(name):
    assert_is_the_models(varied(name), SOURCES, beams=2, steps=37)
    assert_is_the_models(varied(name), SOURCES[:1], beams=1, steps=5)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("batch", [1, len(SOURCES)])
@pytest.mark.usefixtures("uncompiled")
def test_generate_finds_the_same(batch, options):
    inputs, options = padded(SOURCES[:batch]), {"max_extra_length": 6, **options}
    assert_same(varied(), inputs, options)


@pytest.mark.usefixtures("uncompiled")
def test_an_ensemble_of_compiled_members():
    assert_same(ensemble_of(*members(torch.float32)), padded(SOURCES), {"num_beams": 3, "max_extra_length": 6})


def assert_same(model, inputs, options):
    found, expected = (by_us(model, **inputs, **options, compute_type=kind) for kind in ("compiled", "default"))
    assert torch.equal(found.sequences, expected.sequences)
    if options["num_beams"] > 1:
        torch.testing.assert_close(found.sequences_scores, expected.sequences_scores, atol=1e-4, rtol=1e-5)
    if options.get("output_alignments"):
        torch.testing.assert_close(found.alignments, expected.alignments, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("num_beams", [1, 2])
def test_it_needs_float32(num_beams, caplog):
    """It changes nothing of the result, so a model in another type decodes without it, and a warning says so."""
    model, options = lively_model().to(torch.float64), {**padded(SOURCES), "num_beams": num_beams}
    logging.getLogger("transformers").propagate = True
    logging.Logger.warning_once.cache_clear()
    found = model.generate(**options, compute_type="compiled")
    assert re.search(r'`compute_type` is "default" and not "compiled" here, as .* float32 on a CPU', caplog.text)
    assert torch.equal(found, model.generate(**options))


def test_without_a_compiler(folder, monkeypatch):
    """Says what to install, leaves nothing behind, and finds one that has come since."""
    monkeypatch.setattr("torch._inductor.cpp_builder.cpp_compiler_search", _no_compiler)
    model = lively_model()
    for _ in range(2):
        expected = pytest.raises(RuntimeError, match=r'"compiled"` needs a C\+\+ compiler .*; install g\+\+ or clang')
        with torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",)}), expected:
            model.generate(**padded(SOURCES), compute_type="compiled")
    assert not list(folder.iterdir())


def _no_compiler(search):
    raise RuntimeError(f"none of {search} was found")


# ---- where programs are kept ----


@pytest.fixture
def compiler(folder, monkeypatch):
    """In place of the compiler, which is slow: writes the kind to the file; loading it reads that."""
    compiled = []

    def compile_to(weights, kind, folder):
        compiled.append(kind)
        library = folder / "program.so"
        library.write_text(kind)
        return library

    monkeypatch.setattr(compiled_module, "_check_compiler", lambda: None)
    monkeypatch.setattr(compiled_module, "_compile", compile_to)
    monkeypatch.setattr(compiled_module, "_load", lambda path: path.read_text())
    return compiled


def test_programs_are_made_once(compiler, folder):
    """One for few rows and one for many; the next process finds them in their folder."""
    model = lively_model()
    weights = weights_of(model, "compiled")
    few = CPU.rows_for_compiled_products
    for rows, kind in ((1, "few"), (few, "few"), (few + 1, "many"), (500, "many"), (2, "few")):
        assert program_of(weights, rows) == kind
    assert compiler == ["few", "many"]
    assert weights_of(model, "compiled") is weights
    again = Weights(lively_model(), "compiled")
    assert [program_of(again, rows) for rows in (1, 100)] == ["few", "many"]
    assert compiler == ["few", "many"]
    assert sorted(path.name.split("-")[0] for path in folder.iterdir()) == ["few", "many"]


def test_a_program_that_cannot_be_loaded_is_made_again(compiler, folder, monkeypatch):
    """As one of another machine that shares the folder, whose libraries are others."""
    program_of(Weights(lively_model(), "compiled"), 1)
    loaded = mock.Mock(side_effect=[RuntimeError("GLIBC_9.99 not found\nsee above"), "few"])
    monkeypatch.setattr(compiled_module, "_load", loaded)
    with mock.patch.object(program_cache.logger, "warning") as warn:
        assert program_of(Weights(lively_model(), "compiled"), 1) == "few"
    (path,) = folder.iterdir()
    assert warn.call_args.args == (f"{path} can't be loaded (GLIBC_9.99 not found); the decoder is compiled anew.",)
    assert compiler == ["few", "few"]


def _change_a_weight(model):
    with torch.no_grad():
        model.get_decoder().layers[1].encoder_attn.out_proj.weight[0, 0] += 1e-6


def _change_the_activation(model):
    for layer in model.get_decoder().layers:
        layer.feed_forward.activation = torch.nn.GELU()


def _change_a_norm(model):
    model.get_decoder().layers[0].final_layer_norm.eps = 1e-3


def _scale_scores_otherwise(model):
    model.get_decoder().layers[0].self_attn.scaling = 0.25


def _scale_no_embeddings(model):
    model.get_decoder().config.scale_embedding = False


CHANGES = [_change_a_weight, _change_the_activation, _change_a_norm, _scale_scores_otherwise, _scale_no_embeddings]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_what_a_program_depends_on(change):
    prints = []
    for alter in (lambda model: None, lambda model: None, change):
        model = lively_model()
        alter(model)
        prints.append(_fingerprint(Weights(model, "compiled"), "few"))
    assert prints[0] == prints[1] != prints[2]


def test_programs_depend_on_threads_and_kind(monkeypatch):
    weights = Weights(lively_model(), "compiled")
    first = _fingerprint(weights, "few")
    assert first != _fingerprint(weights, "many")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    assert first != _fingerprint(weights, "few")


def test_heads_are_no_part_of_any_weight():
    one, other = (
        lively_model(encoder_attention_heads=heads, decoder_attention_heads=heads, head_dim=32 // heads)
        for heads in (2, 4)
    )
    other.load_state_dict(one.state_dict())
    assert len({_fingerprint(Weights(model, "compiled"), "few") for model in (one, other)}) == 2
