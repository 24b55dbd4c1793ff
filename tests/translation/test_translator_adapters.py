"""Adapters of PEFT: the Translator and generate() say what the adapter says, trained, saved, switched and merged."""

import copy

import pytest
import torch
from peft import LoraConfig, PeftModel, TaskType, get_peft_model

from hf_vanilla_transformer import (
    Translator,
    VanillaTransformerConfig,
    VanillaTransformerForConditionalGeneration,
    engine,
)
from hf_vanilla_transformer.errors import CheckpointError

TEXTS = ["twenty-one", "half past nine on the fourth of May", "it", "drei Euro und fünf Cent"]
PAIRS = {
    "german": [("half past nine", "halb zehn"), ("it costs two hundred", "es kostet zweihundert")],
    "english": [("halb zehn", "half past nine"), ("es kostet zweihundert", "it costs two hundred")],
}
OPTIONS = {"num_beams": 2, "max_new_tokens": 8}
LORA = LoraConfig(task_type=TaskType.SEQ_2_SEQ_LM, r=4, lora_alpha=32, target_modules=["q_proj", "v_proj", "fc1"])


def new_model(tokenizer):
    torch.manual_seed(3)
    config = VanillaTransformerConfig(
        vocab_size=len(tokenizer), d_model=16, encoder_layers=1, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=24, decoder_ffn_dim=24, tie_word_embeddings=False, dropout=0.0,
    )  # fmt: skip
    model = VanillaTransformerForConditionalGeneration(config).eval()
    model.lm_head.weight.data *= 2
    return model


def trained(model, tokenizer, pairs):
    """An adapter after a few steps."""
    adapted = get_peft_model(model, LORA).train()
    sources, targets = ([pair[side] for pair in pairs] for side in (0, 1))
    batch = tokenizer(sources, text_target=targets, padding=True, return_tensors="pt")
    batch["labels"][batch["labels"] == tokenizer.pad_token_id] = -100
    optimizer = torch.optim.AdamW([one for one in adapted.parameters() if one.requires_grad], lr=0.05)
    losses = []
    for _ in range(8):
        loss = adapted(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    return adapted.eval()


@pytest.fixture(scope="module")
def adapters(tokenizer, tmp_path_factory):
    """Folders of two adapters of one base."""
    folders = {}
    for name, pairs in PAIRS.items():
        folders[name] = tmp_path_factory.mktemp(name)
        trained(new_model(tokenizer), tokenizer, pairs).save_pretrained(folders[name])
    return folders


def by_transformers(model, tokenizer):
    """Texts and scores by transformers' own loop, one text at a time, with a copy, which has no engine."""
    own, rows = copy.deepcopy(model), []
    assert own.engine is None
    for text in TEXTS:
        inputs = tokenizer([text], return_tensors="pt")
        output = own.generate(**inputs, **OPTIONS, return_dict_in_generate=True, output_scores=True)
        decoded = tokenizer.decode(output.sequences[0], skip_special_tokens=True).replace("\n", " ").replace("\r", " ")
        rows.append((decoded, output.sequences_scores[0].item()))
    return rows


def says(translator):
    return [(row[0].text, row[0].score) for row in translator(TEXTS, n_best=1, **OPTIONS)]


def assert_same(found, expected):
    assert [text for text, _ in found] == [text for text, _ in expected]
    assert [score for _, score in found] == pytest.approx([score for _, score in expected], abs=1e-4)


def test_adapters_that_are_switched_merged_and_unmerged_show_in_the_next_call(tokenizer, adapters):
    base = new_model(tokenizer)
    before = by_transformers(base, tokenizer)
    engine.attach(base)
    assert_same(says(Translator(base, tokenizer=tokenizer)), before)
    adapted = PeftModel.from_pretrained(base, adapters["german"], adapter_name="german").eval()
    adapted.load_adapter(adapters["english"], adapter_name="english")
    translator = Translator(adapted, tokenizer=tokenizer)
    seen = []
    for name in ("german", "english", "german"):
        adapted.set_adapter(name)
        assert_same(says(translator), by_transformers(adapted, tokenizer))
        seen.append(says(translator))
    assert seen[0] == seen[2] != seen[1]
    with adapted.disable_adapter():
        assert_same(says(translator), before)
    assert says(translator) == seen[0]
    adapted.merge_adapter()
    assert_same(says(translator), seen[0])
    adapted.unmerge_adapter()
    assert_same(says(translator), seen[0])
    assert_same(says(Translator(base, tokenizer=tokenizer)), seen[0])  # the modules of the base are in it
    assert not base.engine.is_on


def test_a_merged_adapter_has_the_engine_again(tokenizer, adapters):
    base = new_model(tokenizer)
    expected = by_transformers(PeftModel.from_pretrained(base, adapters["german"]).eval(), tokenizer)
    base = new_model(tokenizer)
    translator = Translator(base, compute_type="float32", tokenizer=tokenizer)
    before = says(translator)
    merged = PeftModel.from_pretrained(base, adapters["german"]).merge_and_unload()
    assert merged is base
    assert_same(says(translator), expected)
    assert not base.engine.is_on
    with engine.attach(base) as attached:
        assert_same(says(translator), expected)
    assert attached.calls > 0 == attached.fallbacks
    assert says(translator) != before


@pytest.mark.parametrize("calls_while_adapted", [False, True])
def test_adapters_of_a_model_that_the_translator_has_loaded(tokenizer, adapters, tmp_path, calls_while_adapted):
    """PEFT merges by writing to `parameter.data`, which torch doesn't record."""
    new_model(tokenizer).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    translator = Translator(tmp_path, "cpu")
    before = says(translator)
    adapted = PeftModel.from_pretrained(translator.model, adapters["english"]).eval()
    expected = by_transformers(adapted, tokenizer)
    if calls_while_adapted:
        assert_same(says(translator), expected)
    merged = adapted.merge_and_unload()
    assert merged is translator.model
    assert_same(says(translator), expected)
    assert says(translator) != before


def test_saved_adapters_and_merged_checkpoints_are_loaded_again(tokenizer, adapters, tmp_path):
    adapted = PeftModel.from_pretrained(new_model(tokenizer), adapters["german"]).eval()
    expected = by_transformers(adapted, tokenizer)
    adapted.merge_and_unload().save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert_same(says(Translator(tmp_path, "cpu")), expected)


def test_what_cannot_be_had_with_an_adapter_is_said(tokenizer, adapters):
    with pytest.raises(CheckpointError, match=r"it is an adapter of PEFT: give PeftModel.from_pretrained\("):
        Translator(adapters["german"], "cpu")
    adapted = PeftModel.from_pretrained(new_model(tokenizer), adapters["german"]).eval()
    translator = Translator(adapted, tokenizer=tokenizer)
    found = translator("it", alignments=True, coverage_penalty=0.2)
    assert found.alignment.weights.shape == (found.num_tokens, len(found.alignment.source))
    with pytest.raises(engine.EngineError, match="PeftModelForSeq2SeqLM is not VanillaT"):
        Translator(adapted, compute_type="int8", tokenizer=tokenizer)
    adapted.train()
    with pytest.raises(ValueError, match="in training mode"):
        translator("it")
