"""fairseq's checkpoints: the yardstick is the model in plain formulas over their tensors, written anew here."""

import argparse
import math

import pytest
import torch
import torch.nn.functional as F
from plain_reference import Reference, random_weights
from plain_reference import assert_same as assert_same_logits
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from hf_vanilla_transformer import cli
from hf_vanilla_transformer.interop import fairseq, pickles
from hf_vanilla_transformer.interop.convert import recognise
from hf_vanilla_transformer.interop.interface import ConversionError, ConversionOptions

# All sizes differ, so that no axis can be taken for another.
D, FFN, WORDS, TARGET_WORDS, POSITIONS = 12, {"encoder": 10, "decoder": 14}, 17, 19, 25
LAYERS, HEADS = {"encoder": 2, "decoder": 3}, {"encoder": 2, "decoder": 3}
PAD, END = 1, 2
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "out_proj")

CASES = {
    "iwslt": {},
    "base": {"share_all_embeddings": True},
    "one vocabulary on the target side": {"share_decoder_input_output_embed": True},
    "pre-norm": {"encoder_normalize_before": True, "decoder_normalize_before": True},
    "learned positions": {"encoder_learned_pos": True, "decoder_learned_pos": True},
    "unscaled": {"no_scale_embedding": True, "activation_fn": "gelu"},
    "stacked": {"form": "stacked"},
    "numbered norms": {"form": "numbered"},
    "embed_out": {"form": "embed_out"},
    "pre-norm of 0.6": {"form": "0.6", "encoder_normalize_before": True, "decoder_normalize_before": True},
    "settings since 0.10": {"form": "cfg"},
    "settings with a table for each stack": {"form": "tables"},
}
ROLES = {
    "source": "encoder.embed_tokens", "target": "decoder.embed_tokens", "output": "decoder.output_projection",
    "encoder": "encoder.layers.{}", "decoder": "decoder.layers.{}", "attention": PROJECTIONS,
    "feed_forward": ("fc1", "fc2"), "own": ("self_attn", "self_attn"), "cross": "encoder_attn",
    "encoder_norms": ("self_attn_layer_norm", "final_layer_norm"),
    "decoder_norms": ("self_attn_layer_norm", "encoder_attn_layer_norm", "final_layer_norm"),
}  # fmt: skip


def settings(**more):
    """What fairseq saves as `args`."""
    values = {f"{stack}_attention_heads": HEADS[stack] for stack in LAYERS}
    values |= {f"{stack}_layers": LAYERS[stack] for stack in LAYERS} | {f"{stack}_embed_dim": D for stack in LAYERS}
    values |= {f"{stack}_ffn_embed_dim": FFN[stack] for stack in LAYERS}
    values |= {f"max_{side}_positions": POSITIONS for side in ("source", "target")}
    flags = ("normalize_before", "learned_pos", "layerdrop")
    values |= {f"{stack}_{flag}": 0 if flag == "layerdrop" else False for stack in LAYERS for flag in flags}
    return {**values, "arch": "transformer", "activation_fn": "relu", "source_lang": "de", "target_lang": "en", **more}


def tensors(case):
    """Random tensors with fairseq's names of today."""
    torch.manual_seed(5)
    random = lambda *shape: torch.randn(shape) * 0.4  # noqa: E731
    sizes = ((WORDS, TARGET_WORDS), D, (*FFN.values(),), (*LAYERS.values(),))
    state = random_weights(ROLES, *sizes, last_norms=case.get("encoder_normalize_before", False))
    source, target = (f"{ROLES[role]}.weight" for role in ("source", "target"))
    if case.get("share_all_embeddings"):
        state[target] = state[source]
    is_tied = case.get("share_all_embeddings") or case.get("share_decoder_input_output_embed")
    state[f"{ROLES['output']}.weight"] = state[target] if is_tied else random(TARGET_WORDS, D)
    for stack in LAYERS:
        state[f"{stack}.version"] = torch.tensor([3.0])
        state[f"{stack}.embed_positions._float_tensor"] = torch.zeros(1)
        if case.get("encoder_learned_pos"):
            state[f"{stack}.embed_positions.weight"] = random(POSITIONS + PAD + 1, D)
    return state


def older(state, form):
    """The same tensors as earlier versions saved them."""
    found = {}
    for name, value in state.items():
        if form == "embed_out" and name == "decoder.output_projection.weight":
            name = "decoder.embed_out"
        if form == "stacked" and ".q_proj." in name:
            kind = name.rpartition(".")[2]
            parts = [state[name.replace("q_proj", f"{one}_proj")] for one in "qkv"]
            found[name.replace(f"q_proj.{kind}", f"in_proj_{kind}")] = torch.cat(parts)
            continue
        if form == "stacked" and (".k_proj." in name or ".v_proj." in name):
            continue
        if form == "0.6" and name.endswith(".version"):
            value = torch.tensor([2.0])
        if form == "numbered" and "layer_norm" in name:
            stack, norm = name.partition(".")[0], name.split(".")[3]
            name = name.replace(norm, f"layer_norms.{ROLES[f'{stack}_norms'].index(norm)}")
        found[name] = value
    return found


def positions(state, stack):
    """A stack's, which are counted from behind the padding's index."""
    if (learned := state.get(f"{stack}.embed_positions.weight")) is not None:
        return learned[PAD + 1 :]
    half, numbers = D // 2, torch.arange(PAD + 1, PAD + 1 + POSITIONS)
    angles = numbers[:, None] * torch.exp(-math.log(10000) / (half - 1) * torch.arange(half))
    return torch.cat([angles.sin(), angles.cos()], -1)


def write_dictionary(file, size):
    file.write_text("".join(f"w{number} {100 - number}\n" for number in range(size - 5)) + "madeupword0000 0\n")


def checkpoint(folder, case):
    """A folder as fairseq leaves it, and the formulas of its model."""
    folder.mkdir(exist_ok=True)
    form, args = case.get("form"), settings(**{name: value for name, value in case.items() if name != "form"})
    state = tensors(case)
    saved = {"model": older(state, form), "extra_state": {"epoch": 3}}
    if form == "cfg":
        model = argparse.Namespace(**args)
    else:
        model = {s: {n.removeprefix(f"{s}_"): v for n, v in args.items() if n.startswith(s)} for s in LAYERS}
        model |= {"_name": "transformer"} | {n: v for n, v in args.items() if not n.startswith(tuple(LAYERS))}
    if form in ("cfg", "tables"):
        saved["cfg"] = {"model": model, "task": {"source_lang": "de", "target_lang": "en"}}
    else:
        saved["args"] = argparse.Namespace(**args)
    torch.save(saved, folder / "checkpoint_best.pt")
    write_dictionary(folder / "dict.de.txt", WORDS)
    write_dictionary(folder / "dict.en.txt", WORDS if case.get("share_all_embeddings") else TARGET_WORDS)
    activation = F.gelu if args["activation_fn"] == "gelu" else F.relu
    is_pre, is_scaled = args["encoder_normalize_before"], not args.get("no_scale_embedding")
    tables = [positions(state, stack) for stack in LAYERS]
    return Reference(state, ROLES, tuple(HEADS.values()), is_pre, is_scaled, activation, eps=1e-5, tables=tables)


@torch.no_grad()
def assert_same(ours, theirs, searches=True):
    assert_same_logits(ours, theirs.logits, PAD, END, search=False)
    source = torch.tensor([[5, 6, 7, 8, 9, END], [10, 11, END, PAD, PAD, PAD]])
    for beams in (1, 5) if searches else ():
        options = {"attention_mask": (source != PAD).long(), "num_beams": beams, "max_length": 8}
        found = ours.generate(input_ids=source, **options).tolist()
        wanted = [search(theirs, row[row != PAD][None], beams, 7) for row in source]
        assert [[token for token in row if token != PAD] for row in found] == wanted


def search(theirs, row, beams, longest):
    """fairseq-generate: no padding, no empty translation, scores divided by the length, `beams` complete ones end it.

    What isn't complete after `longest` - 1 tokens ends there; transformers counts that end as certain, fairseq doesn't.
    """
    running, complete = [(0.0, [END])], []
    for step in range(longest):
        scored = []
        for score, tokens in running:
            logs = theirs.logits(row, row != PAD, torch.tensor([tokens]))[0, -1].log_softmax(-1)
            if step == longest - 1:
                scored.append((score, [*tokens, END]))
                continue
            allowed = (token for token in range(len(logs)) if token != PAD and (step or token != END))
            scored += [(score + logs[token].item(), [*tokens, token]) for token in allowed]
        scored.sort(reverse=True)
        ended = [one for one in scored[:beams] if one[1][-1] == END]
        complete += [(score / (step + 1), tokens) for score, tokens in ended]
        if len(complete) >= beams:
            break
        running = [one for one in scored[: 2 * beams] if one[1][-1] != END][:beams]
    return max(complete)[1]


@pytest.mark.parametrize("case", CASES)
def test_same_logits_and_translations(case, tmp_path):
    theirs = checkpoint(tmp_path / "model", CASES[case])
    ours = fairseq.load(tmp_path / "model", ConversionOptions(with_tokenizer=False)).model
    assert ours.config.share_encoder_decoder_embeddings == bool(CASES[case].get("share_all_embeddings"))
    assert_same(ours, theirs, searches=case in ("iwslt", "pre-norm", "learned positions"))


def test_dictionaries(tmp_path):
    checkpoint(tmp_path, {})
    file = tmp_path / "dict.de.txt"
    assert fairseq.dictionary(file)[:6] == ["<s>", "<pad>", "</s>", "<unk>", "w0", "w1"]
    assert len(fairseq.dictionary(file)) == WORDS
    file.write_text("<pad> 3 #fairseq:overwrite\na b 2\n")
    assert fairseq.dictionary(file)[4:] == ["<pad>", "a b"]
    for text, message in (("w 3\nw 2\n", "line 2: the token 'w' has been"), ("w\n", "line 1: 'w' isn't a token and")):
        file.write_text(text)
        with pytest.raises(ConversionError, match=message):
            fairseq.dictionary(file)
    write_dictionary(file, WORDS + 1)
    with pytest.raises(ConversionError, match="the source dictionary has 18 entries and the embeddings 17 rows"):
        fairseq.load(tmp_path, ConversionOptions(with_tokenizer=False))


def test_a_file_that_is_read_once_and_words(tmp_path, vanilla_transformer, monkeypatch):
    """A file from before PyTorch 1.6, as the published models of 2018 and 2019 are: no zip archive."""
    theirs, read = checkpoint(tmp_path / "model", {}), []
    assert vanilla_transformer("convert", tmp_path / "model", "--output", tmp_path / "words").code == 0
    assert AutoTokenizer.from_pretrained(tmp_path / "words").tokenize("a  bc") == ["a", "bc"]  # there are no pieces
    file = tmp_path / "model" / "checkpoint_best.pt"
    torch.save(torch.load(file, weights_only=False), file, _use_new_zipfile_serialization=False)
    assert recognise(file) == "fairseq"
    monkeypatch.setattr(fairseq, "read", lambda file: read.append(file) or pickles.read(file))
    result = vanilla_transformer("convert", file, "--no-tokenizer", "--output", tmp_path / "ours")
    assert read == [file]
    assert "note: no tokenizer is written: save yours beside the model" in result.out
    assert_same(AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "ours"), theirs, searches=False)


def test_text_to_text(tmp_path, capsys):
    theirs = checkpoint(tmp_path / "model", {})
    codes = "#version: 0.2\n" + "".join(f"w {n}</w>\n" for n in range(10) if n != 3)
    (tmp_path / "model" / "codes").write_text(codes, encoding="utf-8")
    assert cli.main(["convert", str(tmp_path / "model"), "--output", str(tmp_path / "ours")]) == 0
    limits = (tmp_path / "ours" / "README.md").read_text().partition("## Limits")[2]
    assert "\n\nThe tokenizer does no Moses tokenization" in limits
    assert "note: the tokenizer does no Moses tokenization" in capsys.readouterr().out
    for words, ids in (("w1 w2  w5", [5, 6, 9, END]), (" w3 wx", [3, 3, 3, 3, END])):
        assert cli.main(["translate", "--model", str(tmp_path / "ours"), "--max-new-tokens", "7", words]) == 0
        best = search(theirs, torch.tensor([ids]), 5, 7)[1:-1]
        line = " ".join(["<s>", "<pad>", "</s>", "<unk>", *(f"w{n}" for n in range(99))][n] for n in best)
        assert capsys.readouterr().out == line.replace("<unk>", "").replace("<s>", "").strip() + "\n"
