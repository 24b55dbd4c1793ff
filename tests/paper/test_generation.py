"""Section 6.1 and all of `generate()`: decoding against references written out here, caches, batches, odd input."""

import copy
import functools
import json
import tomllib
from pathlib import Path

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache, EncoderDecoderCache, GenerationConfig, GenerationMixin, StaticCache

from hf_vanilla_transformer import (
    VanillaTransformerConfig,
    VanillaTransformerForConditionalGeneration,
    engine,
    generation_vanilla_transformer,
)
from hf_vanilla_transformer.configuration_vanilla_transformer import CACHE_NAMES
from hf_vanilla_transformer.generation_vanilla_transformer import DecodingMixin
from hf_vanilla_transformer.integration_vanilla_transformer import CACHE, TESTED_VERSIONS

PAD, BOS, EOS = 0, 1, 2
VOCABULARY = 24
# Logits of float32, here up to 10, differ by up to 5e-6 (4 of their last digits) when another number of positions or
# rows is computed at once, since sums are taken in another order. A wrong mask or position moves them by 0.4 and more.
FLOAT32 = {"atol": 1e-5, "rtol": 1e-5}

SOURCES = [
    [5, 9, 14, 6, 20, 8, 17, 11, EOS],
    [7, 3, 19, EOS],
    [12, 22, 4, 10, 16, EOS],
    [21, EOS],
    [13, 18, 15, 23, 5, EOS],
]
SHOWN = {"output_scores": True, "return_dict_in_generate": True}
ENDLESS = {"suppress_tokens": [EOS]}  # then only the maximum length ends a sentence
VARIANTS = {
    "default": {},
    "tied": {"tie_word_embeddings": True},
    "two vocabularies": {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 31},
    "d_k and d_v": {"head_dim": 4, "value_head_dim": 12},
    "learned positions": {"position_encoding": "learned", "max_position_embeddings": 40},
    "one layer and three": {"encoder_layers": 1, "decoder_layers": 3, "decoder_attention_heads": 2},
    "pre-norm, biases": {
        "norm_position": "pre",
        "final_layer_norm": True,
        "attention_bias": True,
        "output_bias": True,
        "position_encoding": "fairseq",
    },
}


def lively_model(seed=3, **fields):
    """An untrained model whose output depends on the source, changes from token to token and sometimes ends.

    Embeddings and output are not tied, as tied ones repeat their input as long as they are untrained. The gains were
    found by trying; they are far from where float32 gets inaccurate.
    """
    torch.manual_seed(seed)
    config = {
        "vocab_size": VOCABULARY,
        "d_model": 32,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 48,
        "decoder_ffn_dim": 48,
        "tie_word_embeddings": False,
        **fields,
    }
    model = VanillaTransformerForConditionalGeneration(VanillaTransformerConfig(**config)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("q_proj.weight", "k_proj.weight")):
                parameter *= 2
            elif name.endswith("encoder_attn.out_proj.weight"):
                parameter *= 0.3
        if not model.config.tie_word_embeddings:
            model.lm_head.weight *= 3
            model.lm_head.weight[[PAD, BOS]] *= 0.1  # so that these two are hardly ever generated
    return model


@functools.cache
def shared(variant="default"):
    """A model that tests leave as it is."""
    return lively_model(**VARIANTS[variant])


@pytest.fixture
def model():
    """Shared: tests leave it as it is."""
    return shared()


def padded(rows, side="right", prefix=""):
    """Rows of ids, none of which is padding, as a batch with its mask."""
    ids = pad_sequence(list(map(torch.tensor, rows)), batch_first=True, padding_value=PAD, padding_side=side)
    return {f"{prefix}input_ids": ids, f"{prefix}attention_mask": (ids != PAD).long()}


def new_tokens(sequence, limit=None, prompt=1):
    """The tokens after the prompt, up to `</s>` or the sentence's limit; nothing but filling may follow."""
    tokens = sequence.tolist()[prompt:]
    end = tokens.index(EOS) + 1 if EOS in tokens else len(tokens)
    end = end if limit is None else min(end, limit)
    # Beam search fills up with </s> where the padding's id is 0, the other modes fill with padding.
    assert set(tokens[end:]) <= {PAD, EOS}
    return tokens[:end]


def gnmt_divisor(length, alpha):
    """lp(Y) of Wu et al. 2016, equation 14."""
    return (5 + length) ** alpha / (5 + 1) ** alpha


@torch.no_grad()
def next_log_probs(model, source, prefixes):
    """Log-probabilities of the token after each prefix (all of one length), computed without a cache: (N, V)."""
    output = model(
        input_ids=torch.tensor([source] * len(prefixes)), decoder_input_ids=torch.tensor(prefixes), use_cache=False
    )
    assert output.cache is None
    return output.logits[:, -1].double().log_softmax(dim=-1)


def reference_beam_search(model, source, num_beams, max_new_tokens, divisor, early_stopping=True, prefix=()):
    """Beam search in plain Python: [(tokens after the prefix, score)], best first; with one beam, greedy search.

    Of the best 2 * num_beams continuations in each step, those that end are finished if they are among the first
    num_beams, and the best others go on. `early_stopping` True: the search stops when num_beams are finished; else when
    the best that goes on can't beat the worst of them, were it divided as at the present length (False) or, if that is
    more, as at the maximum length ("never").
    """
    live, finished = [((), 0.0)], []
    for length in range(1, max_new_tokens + 1):
        log_probs = next_log_probs(model, source, [[BOS, *prefix, *tokens] for tokens, _ in live])
        continuations = [
            ((*tokens, token), score + log_prob)
            for (tokens, score), row in zip(live, log_probs.tolist(), strict=True)
            for token, log_prob in enumerate(row)
        ]
        continuations = sorted(continuations, key=lambda item: -item[1])[: 2 * num_beams]
        ended = [tokens[-1] == EOS or length == max_new_tokens for tokens, _ in continuations]
        finished += [
            (tokens, score / divisor(length))
            for (tokens, score), end in zip(continuations[:num_beams], ended, strict=False)
            if end
        ]
        finished = sorted(finished, key=lambda item: -item[1])[:num_beams]
        live = [item for item, end in zip(continuations, ended, strict=True) if not end][:num_beams]
        if len(finished) == num_beams and live:
            longest = max_new_tokens if early_stopping == "never" else length
            bound = max(live[0][1] / divisor(n) for n in (length, longest))
            if early_stopping is True or bound <= finished[-1][1]:
                break
    return finished


def beams(model, source, **options):
    """All hypotheses that `generate` returns for one source, as the references give them."""
    output = model.generate(
        input_ids=torch.tensor([source]),
        **{**SHOWN, "num_return_sequences": options["num_beams"], **options},
    )
    return hypotheses(output)


def hypotheses(output):
    scores = output.sequences_scores.tolist()
    return [(tuple(new_tokens(row)), score) for row, score in zip(output.sequences, scores, strict=True)]


def assert_same_hypotheses(found, expected):
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    # Sums of up to 10 log-probabilities in float32; neighbours in the ranking differ by more than 1e-3 here.
    assert [score for _, score in found] == pytest.approx([score for _, score in expected], abs=1e-5, rel=1e-5)


# ---- defaults ----
def test_the_papers_decoding_is_the_default(model):
    config = model.generation_config
    assert (config.num_beams, config.early_stopping) == (4, True)
    assert (config.gnmt_length_penalty, config.max_extra_length) == (0.6, 50)
    assert (config.pad_token_id, config.bos_token_id, config.eos_token_id) == (PAD, BOS, EOS)
    assert config.decoder_start_token_id == BOS
    assert config.length_penalty in (None, 1.0)
    assert config.max_length is None
    assert config.max_new_tokens is None
    source = SOURCES[1]  # and without a single argument:
    expected = reference_beam_search(model, source, 4, len(source) + 50, lambda n: gnmt_divisor(n, 0.6))
    assert tuple(new_tokens(model.generate(torch.tensor([source]))[0])) == expected[0][0]


def test_options_are_saved_and_loaded(tmp_path):
    model = lively_model()
    alpha, extra, num_beams = 1.5, 7, 3
    model.generation_config.update(gnmt_length_penalty=alpha, max_extra_length=extra, num_beams=num_beams)
    model.save_pretrained(tmp_path)
    assert "gnmt_length_penalty" not in json.loads((tmp_path / "config.json").read_text())
    assert GenerationConfig.from_pretrained(tmp_path).gnmt_length_penalty == alpha
    loaded = VanillaTransformerForConditionalGeneration.from_pretrained(tmp_path)
    options = {"num_beams": num_beams, "max_new_tokens": 8}
    assert beams(loaded, SOURCES[0], **options) == beams(model, SOURCES[0], **options)
    assert len(loaded.generate(torch.tensor([SOURCES[1]]), **ENDLESS)[0]) == 1 + len(SOURCES[1]) + extra


WAYS = ("argument", "own config", "model's config")


def generate_with(model, way, options, source, **rest):
    """Gives `options` as arguments, in a GenerationConfig of the caller's or as the model's defaults."""
    if way == "argument":
        return model.generate(source, **options, **rest)
    if way == "own config":
        return model.generate(source, generation_config=GenerationConfig(**options, **rest))
    return with_defaults(model, **options).generate(source, **rest)


def with_defaults(model, **options):
    model = copy.deepcopy(model)
    model.generation_config.update(**options)
    return model


@pytest.mark.parametrize("way", WAYS)
def test_options_can_be_overridden(model, way):
    ours, length = {"gnmt_length_penalty": 2.0, "max_extra_length": 2}, len(SOURCES[1]) + 2
    rest = {"num_beams": 3, "num_return_sequences": 3, **SHOWN, **ENDLESS}
    output = generate_with(model, way, ours, torch.tensor([SOURCES[1]]), **rest)
    assert output.sequences.shape == (3, 1 + length)
    log_probs = model.compute_transition_scores(output.sequences, output.scores, output.beam_indices).sum(dim=1)
    torch.testing.assert_close(output.sequences_scores, log_probs / gnmt_divisor(length, 2.0), **FLOAT32)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gnmt_length_penalty": "0.6"}, r"`gnmt_length_penalty` is .*number.*\(the paper: 0\.6\) or None"),
        ({"gnmt_length_penalty": -1}, r"`gnmt_length_penalty` is .*number.*\(the paper: 0\.6\) or None"),
        ({"max_extra_length": -1}, r"`max_extra_length` is .*0 or more tokens .* 50\)"),
        ({"max_extra_length": float("nan")}, r"`max_extra_length` is .*0 or more tokens .* 50\)"),
        (
            {"length_penalty": 0.8, "gnmt_length_penalty": 0.6},
            r"`gnmt_length_penalty` is 0\.6 and `length_penalty` 0\.8.*Set one .* None",
        ),
    ],
)
def test_wrong_options_are_named_with_the_fix(model, options, message, way):
    with pytest.raises(ValueError, match=message):
        generate_with(model, way, options, torch.tensor([SOURCES[0]]))


@pytest.mark.parametrize(("penalty", "way"), [(0.0, "argument"), (1.0, "own config"), (2.0, "model's config")])
def test_transformers_length_penalty_takes_the_place_of_ours(model, way, penalty):
    rest = {"num_beams": 4, "num_return_sequences": 4, "max_new_tokens": 8, **SHOWN}
    if way == "model's config":  # where both stand there, ours has to be switched off
        rest["gnmt_length_penalty"] = None
    output = generate_with(model, way, {"length_penalty": penalty}, torch.tensor([SOURCES[0]]), **rest)
    expected = reference_beam_search(model, SOURCES[0], 4, 8, lambda length: length**penalty)
    assert_same_hypotheses(hypotheses(output), expected)


# ---- beam search ----
@pytest.mark.parametrize(("seed", "alpha", "num_beams"), [(1, 0, 4), (3, 0.6, 4), (7, 2.0, 2)])
def test_beam_search_and_its_end_are_the_references(seed, alpha, num_beams):
    model, found = lively_model(seed), []
    sources = SOURCES if seed == 7 else SOURCES[:1]
    for early_stopping in (True, False, "never"):
        options = {"num_beams": num_beams, "early_stopping": early_stopping, "gnmt_length_penalty": alpha}
        found.append([beams(model, source, **options, max_new_tokens=9) for source in sources])
        for source, of_source in zip(sources, found[-1], strict=True):
            rule = (lambda n: gnmt_divisor(n, alpha), early_stopping)
            assert_same_hypotheses(of_source, reference_beam_search(model, source, num_beams, 9, *rule))
    # With this seed, alpha and beam all three rules lead to other translations.
    assert seed != 7 or found[0] != found[1] != found[2] != found[0]


# ---- a limit of tokens beyond the source's ----
def _kind_of_input(model, kind, inputs):
    """The same source as ids, as embeddings or encoded."""
    if kind == "ids":
        return inputs
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    if kind == "embeddings":
        return {"inputs_embeds": model.get_input_embeddings()(ids), "attention_mask": mask}
    return {"encoder_outputs": model.get_encoder()(ids, mask), "attention_mask": mask}


@pytest.mark.parametrize("num_beams", [1, 4])
@pytest.mark.parametrize("ends", [EOS, [EOS]], ids=str)
def test_an_end_is_forced_at_each_sentences_own_limit(model, num_beams, ends):
    options = {"num_beams": num_beams, "max_extra_length": 1, "forced_eos_token_id": ends, "early_stopping": True}
    found = model.generate(**padded(SOURCES), **options)
    for row, source in zip(found, SOURCES, strict=True):
        alone = model.generate(torch.tensor([source]), **options)[0]
        assert new_tokens(row) == new_tokens(alone)
        assert new_tokens(row)[-1] == EOS


@pytest.mark.parametrize("num_beams", [1, 4])
@pytest.mark.parametrize("endless", [True, False])
@torch.no_grad()
def test_a_sentence_does_not_depend_on_its_batch(model, endless, num_beams):
    """Whichever side is padded, and whether sources come as ids, as embeddings or encoded."""
    options = {"num_beams": num_beams, "max_extra_length": 3, **SHOWN, **(ENDLESS if endless else {})}
    alone = [model.generate(torch.tensor([source]), **options) for source in SOURCES]
    for one, source in zip(alone, SOURCES, strict=True):
        length, limit = one.sequences.shape[1] - 1, len(source) + 3
        assert length == limit if endless else length <= limit
    for kind, side in (("ids", "left"), ("ids", "right"), ("embeddings", "left"), ("encoded", "right")):
        together = model.generate(**_kind_of_input(model, kind, padded(SOURCES, side)), **options)
        for row, source, one in zip(together.sequences, SOURCES, alone, strict=True):
            assert new_tokens(row, len(source) + 3) == new_tokens(one.sequences[0])
        if num_beams > 1:
            scores = torch.cat([one.sequences_scores for one in alone])
            torch.testing.assert_close(together.sequences_scores, scores, **FLOAT32)


@pytest.mark.parametrize("maximum", [{"max_length": 5}, {"max_new_tokens": 30}], ids=str)
@pytest.mark.parametrize(("way", "num_beams"), zip(WAYS, (1, 4, 1), strict=True))
def test_a_fixed_maximum_and_an_extra_take_each_others_place(model, way, maximum, num_beams):
    """A maximum counts, whatever the extra; an extra that a call gives replaces the model's maximum."""
    source, options = torch.tensor([SOURCES[1], SOURCES[1][::-1]]), {"num_beams": num_beams, **ENDLESS}
    found = generate_with(model, way, {**maximum, "max_extra_length": 0}, source, **options)
    assert found.shape == (2, 1 + maximum.get("max_new_tokens", 4))
    if way != "model's config":
        model = with_defaults(model, **maximum)
        found = generate_with(model, way, {"max_extra_length": 2}, source, **options)
        assert found.shape == (2, 1 + source.shape[1] + 2)


@pytest.mark.parametrize("num_beams", [1, 4])
def test_learned_positions_limit_the_length(num_beams):
    learned = lively_model(position_encoding="learned", max_position_embeddings=12)
    options = {"num_beams": num_beams, "max_extra_length": 5, **ENDLESS}
    assert learned.generate(torch.tensor([SOURCES[0]]), **options).shape[1] == 12
    assert learned.generate(torch.tensor([SOURCES[3]]), **options).shape[1] == 1 + 2 + 5
    together = learned.generate(**padded([SOURCES[0], SOURCES[3]]), **options)
    assert together.shape[1] == 12
    assert len(new_tokens(together[1], 7)) == 7
    with pytest.raises(ValueError, match=r"12 learned positions .*Truncate"):
        learned.generate(torch.tensor([SOURCES[0]]), num_beams=num_beams, max_new_tokens=20, **ENDLESS)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("ids", {}),
        ("ids", {"num_beams": 1}),
        ("ids", {"num_beams": 1, "do_sample": True}),
        ("embeddings", {"max_extra_length": 4}),
        ("encoded", {"max_extra_length": 4}),
    ],
)
@torch.no_grad()
def test_no_warning_without_a_reason(model, kind, options, said, recwarn):
    for sources in (SOURCES, SOURCES[:1]):
        model.generate(**_kind_of_input(model, kind, padded(sources)), **options)
    assert said == []
    assert [str(warning.message) for warning in recwarn] == []


@pytest.mark.parametrize("saved", [False, True])
def test_a_maximum_of_20_counts_if_the_user_set_it(model, said, caplog, recwarn, saved, tmp_path):
    """Seq2SeqTrainer writes transformers' default of 20 into the model's generation config, with all others."""
    defaults = GenerationConfig._get_default_generation_params()
    missing = {name: value for name, value in defaults.items() if getattr(model.generation_config, name) is None}
    filled_in, limited = with_defaults(model, **missing), with_defaults(model, max_length=20)
    assert filled_in.generation_config.max_length == 20
    for more in ({}, {"temperature": None}):  # also where a call switches a part of them off
        found = filled_in.generate(torch.tensor([SOURCES[0]]), num_beams=1, **ENDLESS, **more)
        assert found.shape[1] == 1 + len(SOURCES[0]) + 50
    assert said == [str(warning.message) for warning in recwarn] == []
    if saved:
        limited.save_pretrained(tmp_path)
        limited = VanillaTransformerForConditionalGeneration.from_pretrained(tmp_path)
    found = limited.generate(torch.tensor([SOURCES[0]]), num_beams=1, **ENDLESS)
    assert found.shape[1] == 20
    assert not [message for message in [*said, *caplog.messages] if "max_length" in message]


# ---- other ways to decode ----
PREFIXES = [[9, 6], [], [5, 13, 18, 5], [20], [11, 3, 8]]


CACHES = {
    "dynamic": {},
    "static": {"cache_implementation": "static"},
    "static, never compiled": {"cache_implementation": "static", "disable_compile": True},
    "none": {"use_cache": False},
}


@pytest.mark.parametrize("num_beams", [1, 4])
@pytest.mark.parametrize(
    ("variant", "cache"),
    [*(("default", cache) for cache in ("dynamic", "static", "none")), ("learned positions", "dynamic")],
)
def test_prefixes_of_different_lengths_in_one_batch(variant, cache, num_beams):
    prompts = padded([[BOS, *prefix] for prefix in PREFIXES], "left", "decoder_")
    options = {"num_beams": num_beams, "max_extra_length": 3, **CACHES[cache]}
    together = shared(variant).generate(**padded(SOURCES), **prompts, **options)
    width = prompts["decoder_input_ids"].shape[1]
    for row, source, prefix in zip(together, SOURCES, PREFIXES, strict=True):
        assert row[width - len(prefix) : width].tolist() == prefix
        rule = (len(source) + 3, lambda n: gnmt_divisor(n, 0.6))
        best = reference_beam_search(shared(variant), source, num_beams, *rule, prefix=prefix)[0]
        assert tuple(new_tokens(row, len(source) + 3, prompt=width)) == best[0]


def test_the_start_token_is_set_before_a_prefix(model):
    source, prefix = torch.tensor(SOURCES[:1]), torch.tensor(PREFIXES[:1])
    started = torch.nn.functional.pad(prefix, (1, 0), value=BOS)
    found, expected = (model.generate(source, decoder_input_ids=ids, max_new_tokens=5) for ids in (prefix, started))
    assert torch.equal(found, expected)


# ---- caches ----
@pytest.mark.parametrize(("variant", "num_beams"), [("default", 1), *((variant, 4) for variant in VARIANTS)])
def test_no_cache_changes_what_is_generated(variant, num_beams):
    """With it, beam search has to take the cache along as beams are exchanged."""
    model, inputs = shared(variant), padded(SOURCES, "left")
    options = {"num_beams": num_beams, "max_extra_length": 3, **SHOWN}
    expected = model.generate(**inputs, **CACHES["none"], **options)
    assert getattr(expected, CACHE) is None
    for cache in ("dynamic", "static", "static, never compiled")[: 3 if variant == "default" else 2]:
        found = model.generate(**inputs, **CACHES[cache], **options)
        kind = DynamicCache if cache == "dynamic" else StaticCache
        assert isinstance(getattr(found, CACHE).self_attention_cache, kind)
        assert isinstance(getattr(found, CACHE).cross_attention_cache, kind)
        assert torch.equal(found.sequences, expected.sequences)
        torch.testing.assert_close(found.scores, expected.scores, **FLOAT32)


def _new_cache(model, kind, source_length, target_length):
    config = model.config.get_text_config(decoder=True)
    if kind == "dynamic":
        return EncoderDecoderCache(DynamicCache(config=config), DynamicCache(config=config))
    own = StaticCache(config=config, max_cache_len=target_length)
    return EncoderDecoderCache(own, StaticCache(config=config, max_cache_len=source_length))


TARGETS = [[BOS, 9, 4, 17, 12, 6, 20, 3], [BOS, 5, 13, 18, 22], [BOS], [BOS, 8, 8, 21, 7, 10], [BOS, 16, 11]]


@pytest.mark.parametrize(
    ("kind", "name"), [("dynamic", "cache"), ("dynamic", "past_key_values"), ("static with room", "cache")]
)
@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_cached_logits_are_the_uncached(variant, kind, name):
    """Position by position and several at once, with padding on the left of source and target."""
    model = shared(variant)
    inputs, targets = padded(SOURCES, "left"), padded(TARGETS, "left", "decoder_")
    ids, mask = targets["decoder_input_ids"], targets["decoder_attention_mask"]
    expected, encoded = model(**inputs, **targets, use_cache=False).logits, model.get_encoder()(**inputs)
    source = {"encoder_outputs": encoded, "attention_mask": inputs["attention_mask"]}
    for sizes in ([1] * 8, [3, 1, 4], [8]):
        cache = _new_cache(model, kind, inputs["input_ids"].shape[1], 8 + 5 * (kind == "static with room"))
        logits, end = [], 0
        for size in sizes:
            start, end = end, end + size
            target = {"decoder_input_ids": ids[:, start:end], "decoder_attention_mask": mask[:, :end]}
            output = model(**source, **target, **{name: cache})
            logits.append(output.logits)
            assert output.cache is output.past_key_values is cache
            assert cache.get_seq_length() == end
        # Padded positions see nothing; what comes out of them has no meaning.
        torch.testing.assert_close(torch.cat(logits, dim=1)[mask.bool()], expected[mask.bool()], **FLOAT32)


@pytest.mark.parametrize("is_masked", [False, True])
@pytest.mark.parametrize("name", CACHE_NAMES)
@torch.no_grad()
def test_generation_goes_on_from_a_cache(model, name, is_masked):
    """Without a mask too, as transformers' own models don't."""
    inputs, prefix = padded(SOURCES[:1]), torch.tensor([TARGETS[0][:5]])
    options = {"num_beams": 1, "max_new_tokens": 6, **ENDLESS}
    cache = model(**inputs, decoder_input_ids=prefix[:, :4], use_cache=True).cache
    going_on = {name: cache} | ({"decoder_attention_mask": torch.ones_like(prefix)} if is_masked else {})
    found = model.generate(**inputs, decoder_input_ids=prefix, **going_on, **options)
    assert torch.equal(found, model.generate(**inputs, decoder_input_ids=prefix, **options))
    assert cache.get_seq_length() == 5 + 6 - 1
    with pytest.raises(ValueError, match=r"has a past, from which only num_beams=1 goes on"):
        model.generate(**inputs, decoder_input_ids=prefix, **going_on, **{**options, "num_beams": 2})


def test_a_cache_has_one_name_in_a_call(model):
    with pytest.raises(ValueError, match=r"Both `\w+` and `\w+` are set for `VanillaTransformerFor"):
        model.generate(torch.tensor([[5]]), cache=DynamicCache(), past_key_values=DynamicCache())


# ---- versions of transformers that no test has run with ----
def losing_the_cache(name):
    """`prepare_inputs_for_generation` of a version that hands a cache over under another name, or none (None)."""
    handing_over = GenerationMixin.prepare_inputs_for_generation

    @functools.wraps(handing_over)
    def prepare(*args, **kwargs):
        inputs = dict(handing_over(*args, **kwargs))
        if (cache := inputs.pop(CACHE, None)) is not None and name is not None:
            inputs[name] = cache
        return inputs

    return prepare


@pytest.mark.parametrize("name", ["keys_and_values", None])
def test_an_untested_version_that_loses_the_cache_is_refused(model, monkeypatch, name):
    source, options = torch.tensor(SOURCES[:1]), {"max_new_tokens": 6, "num_beams": 2}
    expected = model.generate(source, **options)
    monkeypatch.setattr(DecodingMixin, "has_checked_cache", False)
    monkeypatch.setattr(generation_vanilla_transformer, "transformers_version", "5.99.0")
    assert torch.equal(model.generate(source, **options), expected)
    assert DecodingMixin.has_checked_cache
    monkeypatch.setattr(DecodingMixin, "has_checked_cache", False)
    monkeypatch.setattr(GenerationMixin, "prepare_inputs_for_generation", losing_the_cache(name))
    for _ in range(2):
        with pytest.raises(
            RuntimeError, match=r"transformers 5\.99\.0, .*tested with 5\.23 and 5\.24.*use_cache=False"
        ):
            model.generate(source, **options)
    assert torch.equal(model.generate(source, use_cache=False, **options), expected)


def test_the_versions_that_were_tested_are_those_of_pyproject():
    """The upper bound is the next minor version."""
    pyproject = tomllib.loads(Path(__file__).parents[2].joinpath("pyproject.toml").read_text(encoding="utf-8"))
    (bound,) = (one for one in pyproject["project"]["dependencies"] if one.startswith("transformers"))
    newest = TESTED_VERSIONS[-1].split(".")
    assert set(bound.removeprefix("transformers").split(",")) == {
        f">={TESTED_VERSIONS[0]}", f"<{newest[0]}.{int(newest[1]) + 1}"
    }  # fmt: skip
    assert DecodingMixin.has_checked_cache


# ---- odd input ----
@pytest.mark.parametrize(
    ("encoding", "grown_in_inference"),
    [("paper", False), ("paper", True), ("tensor2tensor", False), ("fairseq", True), ("marian", False)],
)
def test_a_source_beyond_the_table_of_positions(encoding, grown_in_inference):
    source = (torch.arange(150) % 20 + 3)[None]
    short, long = (lively_model(max_position_embeddings=size, position_encoding=encoding) for size in (16, 512))
    saved = short.model.encoder.embed_positions.table.shape
    with torch.inference_mode(grown_in_inference):
        found = short.generate(source, num_beams=2, max_new_tokens=20)
        logits = [model(source, decoder_input_ids=found).logits for model in (short, long)]
    torch.testing.assert_close(*logits, rtol=0, atol=0)
    assert torch.equal(found, long.generate(source, num_beams=2, max_new_tokens=20))
    assert short.model.encoder.embed_positions.table.shape == saved  # DDP sends it from one process to the others
    short.train()  # the table grown then serves for training as well
    short(input_ids=source, labels=source).loss.backward()
    assert short.model.encoder.embed_tokens.weight.grad.isfinite().all()


# ---- masks ----
@pytest.mark.parametrize("use_cache", [True, False])
def test_padding_without_a_mask(use_cache):
    """Padding of sources, and in front of prompts, counts for nothing where the caller gives no mask."""
    model = lively_model()
    batch, prompts = torch.full((2, 9), PAD), torch.tensor([[PAD, PAD, BOS, 7], [BOS, 5, 6, 9]])
    for row, source in zip(batch, (SOURCES[0], SOURCES[1]), strict=True):
        row[: len(source)] = torch.tensor(source)
    options = {"num_beams": 3, "max_new_tokens": 8, "use_cache": use_cache, **ENDLESS}
    together = model.generate(batch, decoder_input_ids=prompts, **options)
    alone = model.generate(batch[:1], decoder_input_ids=prompts[:1, 2:], **options)
    assert together[0, 2:].tolist() == alone[0].tolist()
    alone = model.generate(batch[1:, : len(SOURCES[1])], decoder_input_ids=prompts[1:], **options)
    assert together[1].tolist() == alone[0].tolist()


@pytest.mark.parametrize("width", [3, 12])
def test_a_mask_of_another_width_is_an_error(width):
    model, source = lively_model(), torch.tensor([SOURCES[0]])
    with pytest.raises(ValueError, match=f"mask has {width} positions for 9 tokens"):
        model(input_ids=source, attention_mask=torch.ones(1, width), decoder_input_ids=torch.tensor([[BOS]]))
    with engine.attach(model), pytest.raises(ValueError, match=f"mask has {width} positions for 9 tokens"):
        model.generate(source, attention_mask=torch.ones(1, width), max_new_tokens=4)
