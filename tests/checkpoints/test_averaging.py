"""Averaged checkpoints: the mean that is computed in float64, what is carried along, and what is refused."""

import os
import shutil
from pathlib import Path

import pytest
import torch
from opus_mt import opus_mt_folder
from safetensors.torch import load_file
from trainer_runs import change_json, change_weights
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, GenerationConfig, MarianConfig, MarianMTModel

from hf_vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from hf_vanilla_transformer.checkpoints.averaging import average_checkpoints, mean_of
from hf_vanilla_transformer.checkpoints.completeness import checkpoints_in
from hf_vanilla_transformer.interop.convert import convert


@pytest.fixture
def checkpoints(trained, tmp_path):
    """Four checkpoints, to be changed."""
    run = Path(shutil.copytree(trained, tmp_path / "run"))
    return [run / f"checkpoint-{step}" for step in (1, 2, 3, 4)]


@pytest.fixture
def output(tmp_path):
    return tmp_path / "averaged"


def weights_of(folder):
    return {name: value for file in folder.glob("model*.safetensors") for name, value in load_file(file).items()}


def float64_mean(checkpoints):
    weights = [weights_of(checkpoint) for checkpoint in checkpoints]
    return {name: torch.stack([each[name].double() for each in weights]).mean(0) for name in weights[0]}


def saved_as(checkpoints, folder, dtype, max_shard_size):
    """The checkpoints' models, saved again."""
    folders = []
    for checkpoint in checkpoints:
        model = AutoModelForSeq2SeqLM.from_pretrained(checkpoint, dtype=dtype)
        folders.append(folder / checkpoint.name)
        model.save_pretrained(folders[-1], max_shard_size=max_shard_size)
        AutoTokenizer.from_pretrained(checkpoint).save_pretrained(folders[-1])
        (folders[-1] / "trainer_state.json").write_text((checkpoint / "trainer_state.json").read_text())
    return folders


# The mean


@pytest.mark.parametrize(
    ("number", "dtype", "max_shard_size"),
    [
        (1, torch.float32, "50GB"),
        (4, torch.float32, "50GB"),
        (4, torch.float32, "40KB"),
        (4, torch.bfloat16, "50GB"),
        (4, torch.float16, "50GB"),
    ],
)
def test_the_mean_is_that_of_float64(checkpoints, tmp_path, output, number, dtype, max_shard_size):
    """In float32 within its bound; half precision is rounded once, as its sums fit into float32's 24 bits."""
    saved = saved_as(checkpoints[-number:], tmp_path / "saved", dtype, max_shard_size)
    assert (saved[0] / "model.safetensors").exists() == (max_shard_size == "50GB")
    given = [checkpoints[-number], *saved[1:]] if dtype == torch.float32 else saved  # a sharded one beside a plain one
    average_checkpoints(given, output)
    assert (output / "model.safetensors").exists()
    mean, expected, weights = weights_of(output), float64_mean(given), [weights_of(folder) for folder in checkpoints]
    assert mean.keys() == expected.keys()
    for name, value in mean.items():
        largest = max(each[name].abs().max().item() for each in weights)
        bound = number * 2.0**-24 * largest if dtype == torch.float32 else 0.0
        assert value.dtype == dtype
        assert (value.double() - expected[name].to(dtype).double()).abs().max() <= bound, name
        assert any(not torch.equal(value, each[name]) for each in weights)
    model = AutoModelForSeq2SeqLM.from_pretrained(output)
    assert model.dtype == dtype
    assert model.lm_head.weight is model.model.encoder.embed_tokens.weight


def test_float64_isnt_rounded_to_float32_and_integers_have_to_be_equal(checkpoints, output):
    for step, checkpoint in enumerate(checkpoints):
        extra = torch.tensor([1.0 + step * 2.0**-40], dtype=torch.float64)
        change_weights(checkpoint, extra=extra, counts=torch.tensor([2**40 + 1, 3]))
    mean = mean_of(checkpoints)
    assert (mean["extra"].tolist(), mean["counts"].tolist()) == ([1.0 + 1.5 * 2.0**-40], [2**40 + 1, 3])
    with pytest.raises(ValueError, match=r"checkpoint-4: the model has no counts"):  # its configuration has none
        average_checkpoints(checkpoints, output)
    assert not output.exists()
    change_weights(checkpoints[2], counts=torch.tensor([2**40 + 1, 4]))
    with pytest.raises(ValueError, match=r"checkpoint-3: counts is torch.int64 and differs from .*checkpoint-1's"):
        mean_of(checkpoints)


SIZES = {
    "vocab_size": 20, "d_model": 8, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 8,
    "decoder_ffn_dim": 8, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
}  # fmt: skip
UNTIED = {"share_encoder_decoder_embeddings": False, "tie_word_embeddings": False, "decoder_vocab_size": 30}
TOKENS = {"pad_token_id": 0, "decoder_start_token_id": 0, "eos_token_id": 1, "forced_eos_token_id": 1}


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        (VanillaTransformerForConditionalGeneration, VanillaTransformerConfig(**SIZES, **UNTIED)),
        (MarianMTModel, MarianConfig(**SIZES, **TOKENS)),
    ],
)
def test_weights_that_are_not_tied_and_models_of_transformers(tmp_path, output, kind, config):
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        kind(config).save_pretrained(folder)
    average_checkpoints(folders, output)
    weights, expected = kind.from_pretrained(output).state_dict(), float64_mean(folders)
    assert ("lm_head.weight" in expected) == (kind is not MarianMTModel)
    for name, value in expected.items():
        torch.testing.assert_close(weights[name].double(), value, rtol=1e-6, atol=1e-8)


# What comes along


def test_configuration_tokenizer_and_code_are_the_last_checkpoints(checkpoints, output):
    """What training changes may differ before."""
    GenerationConfig(num_beams=7).save_pretrained(checkpoints[-1])
    change_json(checkpoints[0] / "config.json", dropout=0.3, use_cache=True, transformers_version="5.24.0")
    change_json(checkpoints[0] / "config.json", custom_pipelines={})  # as an older version writes it
    padding = {"strategy": "BatchLongest", "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0}
    change_json(checkpoints[1] / "tokenizer.json", padding=padding | {"pad_type_id": 0, "pad_token": "<pad>"})
    average_checkpoints(checkpoints, output)
    kept = {
        file.name
        for file in checkpoints[-1].iterdir()
        if file.suffix in (".py", ".json") and file.name != "trainer_state.json"
    } | {"LICENSE-CODE"}
    assert {file.name for file in output.iterdir()} == kept | {"model.safetensors"}
    assert len(list(output.glob("*.py"))) == 6
    for name in kept:
        assert (output / name).read_bytes() == (checkpoints[-1] / name).read_bytes()
    assert AutoModelForSeq2SeqLM.from_pretrained(output, trust_remote_code=True).generation_config.num_beams == 7
    text = "der vierte Mai, 4€"
    mine, theirs = (AutoTokenizer.from_pretrained(folder)(text)["input_ids"] for folder in (output, checkpoints[0]))
    assert mine == theirs


def test_the_tokenizer_of_a_converted_model(tmp_path, output):
    convert(opus_mt_folder(tmp_path / "marian"), tmp_path / "opus")
    average_checkpoints([tmp_path / "opus"], output / "deep" / "down")  # the folders are made
    tokenizer, own = (AutoTokenizer.from_pretrained(folder) for folder in (output / "deep" / "down", tmp_path / "opus"))
    assert tokenizer("half", text_target="halb") == own("half", text_target="halb")


# What doesn't fit together


def _replace(name, change):
    return lambda checkpoint: change_weights(
        checkpoint, **{name: change(load_file(checkpoint / "model.safetensors")[name]).contiguous()}
    )


NORM = "model.encoder.layers.0.self_attn_layer_norm.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: change_weights(c, **{NORM: None}), f"the tensors of .*-3 and .*-1 differ in {NORM}; average ch"),
        (lambda c: change_weights(c, news=torch.ones(1)), "checkpoint-1 differ in news"),
        (_replace(NORM, lambda w: w[:-1]), f"the tensors of .*checkpoint-1 differ in {NORM}"),
        (_replace(NORM, lambda w: w.half()), f"the tensors of .*checkpoint-1 differ in {NORM}"),
        (_replace(NORM, lambda w: w * float("nan")), f"checkpoint-3: {NORM} contains NaN or infinity"),
        (_replace(NORM, lambda w: w * float("-inf")), f"checkpoint-3: {NORM} contains NaN or infinity"),
        (lambda c: change_json(c / "config.json", norm_position="pre"), "config.json of .* differ in norm_position"),
        (lambda c: change_json(c / "tokenizer.json", version="2"), "tokenizer of .*-3 and .*-1 differ in tokenizer"),
        (lambda c: (c / "tokenizer.json").unlink(), "tokenizer of .*-3 and .*-1 differ in tokenizer"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_by_name(checkpoints, output, change, message):
    change(checkpoints[2])
    with pytest.raises(ValueError, match=message):
        average_checkpoints(checkpoints, output)
    assert {entry.name for entry in output.parent.iterdir()} == {"run"}  # nothing half done is left


def test_what_cant_be_averaged_is_named(checkpoints, output):
    with pytest.raises(ValueError, match="no checkpoints to average"):
        average_checkpoints([], output)
    with pytest.raises(ValueError, match="checkpoint-1 is given twice"):
        average_checkpoints([*checkpoints, checkpoints[1].parent / "checkpoint-2" / ".." / "checkpoint-1"], output)
    os.truncate(checkpoints[1] / "model.safetensors", 1000)
    with pytest.raises(ValueError, match=r"checkpoint-2: model.safetensors is cut .*nothing: there is no such folder"):
        average_checkpoints([*checkpoints, output.parent / "nothing"], output)


# The output


def test_an_output_is_replaced_only_if_asked(checkpoints, output):
    average_checkpoints(checkpoints[:2], output)
    before = weights_of(output)
    (output / "README.md").write_text("notes")
    (output / "LICENSE").write_text("MIT")
    with pytest.raises(ValueError, match="averaged exists; choose another output, or ask to overwrite it"):
        average_checkpoints(checkpoints, output)
    assert (output / "README.md").exists()
    average_checkpoints(checkpoints, output, overwrite=True)
    assert not (output / "README.md").exists()
    assert (output / "LICENSE").read_text() == "MIT"
    assert any(not torch.equal(value, before[name]) for name, value in weights_of(output).items())
    assert {entry.name for entry in output.parent.iterdir()} == {"run", "averaged"}


def test_nothing_but_a_model_is_overwritten(checkpoints, output):
    run = Path(shutil.copytree(checkpoints[0].parent, output.with_name("another")))
    shutil.copy(checkpoints[0] / "config.json", run)  # as the Trainer's save_model leaves it
    notes, code = output.with_name("notes") / "thesis.txt", output.with_name("notes") / "own" / "train.py"
    average_checkpoints(checkpoints[:1], output)
    for file in (notes, code, output / "serve.py"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("mine")
    for place in (run, notes.parent, notes, code.parent, code, output):
        with pytest.raises(ValueError, match="is not just a saved model"):
            average_checkpoints(checkpoints, place, overwrite=True)
    assert all((checkpoint / "optimizer.pt").exists() for checkpoint in checkpoints_in(run))
    assert [file.read_text() for file in (notes, code, output / "serve.py")] == ["mine"] * 3


def test_an_output_that_is_a_checkpoint_or_a_link(checkpoints, output):
    """It isn't one of those that are averaged; where a link leads, it is written."""
    average_checkpoints(checkpoints[:1], output)
    with pytest.raises(ValueError, match="averaged is one of the checkpoints; choose another output"):
        average_checkpoints([checkpoints[1], output], output, overwrite=True)
    link = output.with_name("link")
    link.symlink_to(output)
    average_checkpoints(checkpoints, link, overwrite=True)
    assert link.is_symlink()
    assert not torch.equal(weights_of(output)[NORM], weights_of(checkpoints[0])[NORM])
    assert {entry.name for entry in output.parent.iterdir()} == {"run", "averaged", "link"}


# Old and new output change places


@pytest.mark.parametrize(("failing", "interruption"), [(1, OSError("Disk quota exceeded")), (2, KeyboardInterrupt())])
def test_a_rename_that_fails_restores_the_old_output(checkpoints, output, monkeypatch, failing, interruption):
    average_checkpoints(checkpoints[:1], output)
    old = {file: file.read_bytes() for file in output.iterdir()}
    rename, calls = Path.rename, []

    def fails(path, target):
        calls.append(path)
        if len(calls) == failing:
            raise interruption
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", fails)
        with pytest.raises(type(interruption)):
            average_checkpoints(checkpoints[:2], output, overwrite=True)
    assert {file: file.read_bytes() for file in output.iterdir()} == old
    assert {entry.name for entry in output.parent.iterdir()} == {"run", "averaged"}
