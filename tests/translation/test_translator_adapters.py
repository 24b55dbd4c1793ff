"""Adapters of PEFT: the Translator and generate() say what the adapter says, trained, saved, switched and merged."""

import copy

import pytest
import torch
from peft import LoraConfig, PeftModel, PrefixTuningConfig, TaskType, get_peft_model
from random_models import new_model

from hf_vanilla_transformer import Translator, engine
from hf_vanilla_transformer.errors import CheckpointError
from hf_vanilla_transformer.integration_vanilla_transformer import CACHE

TEXTS = ["twenty-one", "half past nine on the fourth of May", "it", "drei Euro und fünf Cent"]
PAIRS = {
    "german": [("half past nine", "halb zehn"), ("it costs two hundred", "es kostet zweihundert")],
    "english": [("halb zehn", "half past nine"), ("es kostet zweihundert", "it costs two hundred")],
}
OPTIONS = {"num_beams": 2, "max_new_tokens": 8}
KIND = {"task_type": TaskType.SEQ_2_SEQ_LM}
LORA = LoraConfig(**KIND, r=4, lora_alpha=32, target_modules=["q_proj", "v_proj", "fc1"])


def base_model(tokenizer):
    return new_model(len(tokenizer), dropout=0.0)


def trained(model, tokenizer, pairs, config=LORA):
    """An adapter after a few steps."""
    adapted = get_peft_model(model, config).train()
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
        trained(base_model(tokenizer), tokenizer, pairs).save_pretrained(folders[name])
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
    base = base_model(tokenizer)
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


@pytest.mark.parametrize("calls_while_adapted", [False, True])
def test_adapters_of_a_model_that_the_translator_has_loaded(tokenizer, adapters, tmp_path, calls_while_adapted):
    """PEFT merges by writing to `parameter.data`, which torch doesn't record."""
    base_model(tokenizer).save_pretrained(tmp_path)
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
    assert not merged.engine.is_on
    with engine.attach(merged) as attached:
        assert_same(says(translator), expected)
    assert attached.calls > 0 == attached.fallbacks


def test_what_cannot_be_had_with_an_adapter_is_said(tokenizer, adapters):
    with pytest.raises(CheckpointError, match=r"it is an adapter of PEFT: give PeftModel.from_pretrained\("):
        Translator(adapters["german"], "cpu")
    adapted = PeftModel.from_pretrained(base_model(tokenizer), adapters["german"]).eval()
    translator = Translator(adapted, tokenizer=tokenizer)
    found = translator("it", alignments=True, coverage_penalty=0.2)
    assert found.alignment.weights.shape == (found.num_tokens, len(found.alignment.source))
    with pytest.raises(engine.EngineError, match="PeftModelForSeq2SeqLM is not VanillaT"):
        Translator(adapted, compute_type="int8", tokenizer=tokenizer)


@pytest.mark.parametrize(
    "where",
    [
        {"target_modules": ["embed_tokens", "q_proj"]},
        {"target_modules": ["q_proj"], "trainable_token_indices": {"embed_tokens": [3, 4]}},
    ],
    ids=["embeddings", "new tokens"],
)
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
def test_adapters_of_embeddings(tokenizer, where):
    adapted = trained(base_model(tokenizer), tokenizer, PAIRS["german"], LoraConfig(**KIND, **where))
    assert_same(says(Translator(adapted, tokenizer=tokenizer)), by_transformers(adapted, tokenizer))


def test_a_trained_prefix_is_used_or_refused(tokenizer):
    """PEFT 0.21 hands it over as `past_key_values`; under transformers 5.24, stock models generate without it."""
    base = base_model(tokenizer)
    prefix = PrefixTuningConfig(**KIND, num_virtual_tokens=3, num_layers=base.config.decoder_layers)
    adapted = trained(base, tokenizer, PAIRS["german"], prefix)
    translator, inputs = Translator(adapted, tokenizer=tokenizer), tokenizer(TEXTS[:1], return_tensors="pt")
    if CACHE == "cache":
        with pytest.raises(ValueError, match=r"Both `.* a prefix .*transformers 5\.23"):
            adapted.generate(**inputs, **OPTIONS)
        with pytest.raises(ValueError, match=r"a prefix .*from transformers 5\.24 on; use 5\.23"):
            translator(TEXTS[0])
        return
    greedy = {"num_beams": 1, "max_new_tokens": 8}
    found = adapted.generate(**inputs, **greedy)
    logits = adapted(**inputs, decoder_input_ids=found[:, :-1]).logits
    assert torch.equal(found[:, 1:], logits.argmax(dim=-1))
    assert translator(TEXTS[0], **greedy) == tokenizer.decode(found[0], skip_special_tokens=True)


@pytest.mark.skipif(CACHE == "past_key_values", reason="transformers 5.23 takes this version of PEFT")
def test_transformers_own_adapters_need_a_newer_peft(tokenizer):
    """The docs say so; when this fails, PEFT 0.22 is out, and they can go."""
    with pytest.raises(ValueError, match=r"PEFT you are using is not compatible, please use a version >= 0\.22\.0"):
        base_model(tokenizer).add_adapter(LORA)
