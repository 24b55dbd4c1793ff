# SPDX-License-Identifier: Apache-2.0
"""How a call decodes, resolved once: from its options, the model's generation config and the configuration.

Everything that decodes takes a `Plan`: transformers' loop, the engine's decoders, CTranslate2, and what tells users how
a model decodes. This file needs neither torch nor transformers.
"""

import functools
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger(__name__)

# Options of this package in `GenerationConfig`, and those that only its own decoders have.
OPTIONS = ("gnmt_length_penalty", "max_extra_length")
ENGINE_OPTIONS = ("coverage_penalty", "output_alignments")
LENGTHS = ("max_new_tokens", "max_length", "max_extra_length")
SAID = ("coverage_penalty", "no_repeat_ngram_size", "repetition_penalty", "min_new_tokens", "min_length")

# transformers' default of `max_length`, and what Seq2SeqTrainer fills in beside it.
DEFAULT_MAX_LENGTH = 20
FILLED_IN = ("temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "num_return_sequences")

# Settings that change no translation as long as nothing is sampled or assisted: `do_sample` and the like are told.
WITHOUT_EFFECT = {
    *("temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff"),
    *("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold", "compute_type"),
    *("assistant_lookbehind", "target_lookbehind", "max_matching_ngram_size"),
    *("bos_token_id", "transformers_version", "return_dict_in_generate", "max_cache_len"),
}
# Values of other settings that change nothing: transformers' defaults, which Seq2SeqTrainer writes into a model's, and
# what is off.
DEFAULTS = {
    **{"use_cache": True, "encoder_repetition_penalty": 1.0, "encoder_no_repeat_ngram_size": 0, "guidance_scale": 1},
    **{"num_beam_groups": 1, "diversity_penalty": 0.0, "logits_processor": [], "stopping_criteria": []},
    **dict.fromkeys(("do_sample", "remove_invalid_values", "token_healing", "is_assistant", "low_memory"), False),
    **dict.fromkeys(("output_scores", "output_logits", "output_attentions", "output_hidden_states"), False),
    **dict.fromkeys(("synced_gpus", "trust_remote_code", "disable_compile"), False),
}


class GNMTLengthPenalty(float):
    """The alpha of Wu et al. 2016 (eq. 14), for which `length ** alpha` is ((5 + length) / 6) ** alpha.

    transformers' beam search divides scores by `length ** length_penalty`: with this number as its penalty, it ranks
    as the paper's does, and stops as its bounds say with the same formula.
    """

    def __rpow__(self, length: int, mod: None = None) -> float:  # type: ignore[override]
        """Returns the divisor of a hypothesis of `length` tokens, the end of sentence included."""
        return ((5 + length) / 6) ** float(self)


@dataclass(frozen=True)
class Plan:
    """How a call decodes.

    Attributes:
        num_beams: Beams per sentence; 1: greedy search.
        num_hypotheses: Hypotheses per sentence that are returned.
        limit: What limits lengths, and its value: "max_new_tokens", "max_length" (with the prompt), "max_extra_length"
            (new tokens beyond those of the source), or "default": nothing is set, and it is transformers' 20.
        min_new_tokens: New tokens before the end at least; None: `min_length` counts.
        min_length: The same, counting the prompt.
        length_penalty: Scores are log-probabilities / length ** length_penalty: the paper's (`GNMTLengthPenalty`) or
            transformers'.
        early_stopping: True: a search ends as soon as it has `num_beams` hypotheses (the paper's). "never": when no
            beam can become better than the worst of them, whatever follows. False: when no beam would be if it ended
            now.
        coverage_penalty: beta of Wu et al. 2016 (eq. 15); 0: none.
        alignments: Whether the attention of new tokens to the source is returned.
        start: The token that the decoder begins with.
        ends: Tokens that end a hypothesis.
        padding: The token that stands after an end.
        forced_begin: The first token, if it is forced.
        forced_end: Tokens of which one is the last at the limit, if that is forced.
        barred: Tokens that are never chosen (`suppress_tokens`).
        barred_at_begin: Tokens that aren't the first.
        barred_words: Sequences of tokens that aren't written (`bad_words_ids`); as in transformers, an end is none.
        no_repeat_ngram_size: Sequences of this many tokens occur at most once; 0: there is no limit.
        repetition_penalty: As for transformers; 1: none.
        renormalize: Whether log-probabilities add up to 1 again after tokens were barred.
        others: Settings beyond these, and values that transformers alone understands.
    """

    num_beams: int = 1
    num_hypotheses: int = 1
    limit: tuple[str, int] = ("default", DEFAULT_MAX_LENGTH)
    min_new_tokens: int | None = None
    min_length: int = 0
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    coverage_penalty: float = 0.0
    alignments: bool = False
    start: int | None = None
    ends: tuple[int, ...] = ()
    padding: int | None = None
    forced_begin: int | None = None
    forced_end: tuple[int, ...] = ()
    barred: tuple[int, ...] = ()
    barred_at_begin: tuple[int, ...] = ()
    barred_words: tuple[tuple[int, ...], ...] = ()
    no_repeat_ngram_size: int = 0
    repetition_penalty: float = 1.0
    renormalize: bool = False
    others: tuple[str, ...] = ()

    @classmethod
    def of(cls, options: Mapping[str, object], own: object) -> "Plan":
        """Resolves how a call decodes.

        Options of the call come first; one that is None switches the model's off. Then comes a `generation_config`
        among them, then the model's own. A penalty of the call takes the place of the model's, whatever its formula; a
        length of the call takes that of the model's `max_extra_length`. Of transformers' two, `max_new_tokens` counts.

        Args:
            options: Those of `generate()`, without its inputs.
            own: The model's generation config, or its values by name.

        Raises:
            ValueError: An option of this package has a wrong value, or two contradict each other.
        """
        given = {**settings_in(options.get("generation_config")), **options}
        given = {name: value for name, value in given.items() if name != "generation_config"}
        own = settings_in(own)
        settings = {**dict.fromkeys((*OPTIONS, *ENGINE_OPTIONS)), **own, **given}
        if settings.get("decoder_start_token_id") is None:
            settings["decoder_start_token_id"] = settings.get("bos_token_id")
        beta = settings["coverage_penalty"]
        known: dict[str, Any] = {
            "coverage_penalty": 0.0 if beta is None else _from_0_up("coverage_penalty", beta, "0.2"),
            "alignments": bool(settings["output_alignments"]),
        }
        others = _others(settings)
        if options.get("compute_type") is not None:  # a generation config may have one, a call may not
            others.append(_shown("compute_type", options["compute_type"]))
        values = {field: (name, settings.get(name), read) for field, (name, read) in READERS.items()}
        values["length_penalty"] = ("length_penalty", _penalty(settings, given), _number)
        if (name := _limit(settings, given, own)) is not None:
            values["limit"] = (name, (name, settings[name]), _length)
        for field, (name, value, read) in values.items():
            if value is not None:
                try:
                    known[field] = read(value)
                except (TypeError, ValueError):
                    others.append(_shown(name, value))
        words, ends = known.get("barred_words", ()), known.get("ends", ())
        known["barred_words"] = tuple(one for one in words if len(one) > 1 or one[0] not in ends)
        return cls(**known, others=tuple(others))

    @property
    def needs_attention(self) -> bool:
        """Whether a search has to know what each step attends to, which transformers' loop doesn't."""
        return self.alignments or self.coverage_penalty > 0

    def max_new_tokens(self, source_length: int, prompt_length: int = 1) -> int:
        """Returns how many new tokens a sentence gets at most, at least 1; the start token is part of its prompt."""
        name, value = self.limit
        if name == "max_length":
            value -= prompt_length
        elif name == "max_extra_length":
            value += source_length
        return max(value, 1)

    def __str__(self) -> str:
        """Says in a few words how it searches: "beam 4, length penalty 0.6"."""
        is_sampled, is_beam = "do_sample=True" in self.others, self.num_beams > 1
        settings = self.settings()
        name = "length penalty " if "gnmt_length_penalty" in settings else "length_penalty="
        said = ["sampled"] if is_sampled else [] if is_beam else ["greedy"]
        said += [f"beam {self.num_beams}", f"{name}{self.length_penalty:g}"] if is_beam else []
        said += [f"early_stopping={self.early_stopping}"] if is_beam and self.early_stopping is not True else []
        said += [f"{name}={settings[name]}" for name in SAID if name in settings and settings[name] != 1]
        return ", ".join([*said, *(one for one in self.others if one != "do_sample=True")])

    def settings(self) -> dict[str, object]:
        """Returns the plan by the names of the settings that a generation config has, without those that are off."""
        penalty = "gnmt_length_penalty" if isinstance(self.length_penalty, GNMTLengthPenalty) else "length_penalty"
        limit, value = self.limit
        values: dict[str, object] = {
            **{name: getattr(self, field) for field, (name, _) in READERS.items()},
            "max_length" if limit == "default" else limit: value,
            penalty: float(self.length_penalty),
            "coverage_penalty": self.coverage_penalty,
        }
        kept = (penalty, "early_stopping")
        return {
            setting: _as_list(one) for setting, one in values.items() if one not in (None, (), 0) or setting in kept
        }


# ---- Reading settings ----
def _whole(value: object, least: int = 0) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError
    return value


def _tokens(value: object) -> tuple[int, ...]:
    tokens = tuple(map(_whole, value if isinstance(value, list | tuple) else [value]))
    if not tokens:
        raise ValueError
    return tokens


def _list_of_tokens(value: object) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise ValueError
    return tuple(map(_whole, value))


def _words(value: object) -> tuple[tuple[int, ...], ...]:
    if not isinstance(value, list) or not value or not all(value):
        raise ValueError
    return tuple(map(_list_of_tokens, value))


def _one_of(*values: object) -> Callable[[object], object]:
    def read(value: object) -> object:
        if not any(value is one or (isinstance(one, str) and value == one) for one in values):
            raise ValueError
        return value

    return read


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError
    return value


def _factor(value: object) -> float:
    if (number := _number(value)) <= 0:
        raise ValueError
    return float(number)


def _length(value: Any) -> tuple[str, int]:
    return value[0], _whole(value[1], least=int(value[0] != "max_extra_length"))


# Fields of a plan that have one setting each: its name, and what reads its value.
READERS: dict[str, tuple[str, Callable[[object], object]]] = {
    "num_beams": ("num_beams", functools.partial(_whole, least=1)),
    "num_hypotheses": ("num_return_sequences", functools.partial(_whole, least=1)),
    "min_new_tokens": ("min_new_tokens", _whole),
    "min_length": ("min_length", _whole),
    "early_stopping": ("early_stopping", _one_of(True, False, "never")),
    "start": ("decoder_start_token_id", _whole),
    "ends": ("eos_token_id", _tokens),
    "padding": ("pad_token_id", _whole),
    "forced_begin": ("forced_bos_token_id", _whole),
    "forced_end": ("forced_eos_token_id", _tokens),
    "barred": ("suppress_tokens", _list_of_tokens),
    "barred_at_begin": ("begin_suppress_tokens", _list_of_tokens),
    "barred_words": ("bad_words_ids", _words),
    "no_repeat_ngram_size": ("no_repeat_ngram_size", _whole),
    "repetition_penalty": ("repetition_penalty", _factor),
    "renormalize": ("renormalize_logits", _one_of(True, False)),
}
KNOWN = {*OPTIONS, *ENGINE_OPTIONS, *LENGTHS, "length_penalty", *(name for name, _ in READERS.values())}


def settings_in(config: object) -> dict[str, Any]:
    """Returns the settings of a configuration that are no None."""
    values = config if isinstance(config, Mapping) else {} if config is None else vars(config)
    return {name: value for name, value in values.items() if value is not None}


def _others(settings: Mapping[str, object]) -> list[str]:
    """Names the settings that a plan doesn't have, with their values."""
    names = [name for name in settings if name not in KNOWN | WITHOUT_EFFECT and not name.startswith("_")]
    return [_shown(name, settings[name]) for name in names if not _is_neutral(name, settings[name])]


def _is_neutral(name: str, value: object) -> bool:
    is_comparable = isinstance(value, bool | int | float | list)  # a tensor isn't
    return value is None or (name in DEFAULTS and is_comparable and value == DEFAULTS[name])


def _shown(name: str, value: object) -> str:
    return f"{name}={value!r}" if type(value) in (bool, int, float, str, list) else name


def _as_list(value: object) -> object:
    return [_as_list(one) for one in value] if isinstance(value, tuple) else value


def _limit(settings: Mapping[str, object], given: Mapping[str, object], own: Mapping[str, object]) -> str | None:
    """Returns the name of the setting that limits lengths."""
    names, extra = LENGTHS[:2], settings["max_extra_length"]
    if extra is not None and (isinstance(extra, bool) or not isinstance(extra, int) or extra < 0):
        raise ValueError(f"`max_extra_length` is {extra!r}; give 0 or more tokens (the paper: 50), or None.")
    own = {name: value for name, value in own.items() if name not in names or settings[name] is not None}
    if not any(given.get(name) is not None for name in names) and (
        given.get("max_extra_length") is not None or (extra is not None and not sets_length(own))
    ):
        return LENGTHS[2]
    return next((name for name in names if settings.get(name) is not None), None)


def _penalty(settings: Mapping[str, object], given: Mapping[str, object]) -> object:
    """Returns the penalty of lengths, of which a call's takes the place of the model's."""
    power, alpha, own = settings.get("length_penalty"), settings["gnmt_length_penalty"], given.get("length_penalty")
    if isinstance(own, GNMTLengthPenalty):  # of a configuration that was prepared before
        return own
    if alpha is None or (own is not None and given.get("gnmt_length_penalty") is None):
        return power
    alpha = _from_0_up("gnmt_length_penalty", alpha, "the paper: 0.6")
    if power not in (None, 1.0):
        raise ValueError(
            f"`gnmt_length_penalty` is {alpha} and `length_penalty` {power}: two formulas for one thing. Set one of "
            "the two to None."
        )
    return GNMTLengthPenalty(alpha)


def _from_0_up(name: str, value: object, example: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"`{name}` is {value!r}; it has to be a number from 0 up ({example}) or None.")
    return float(value)


def sets_length(own: Mapping[str, object]) -> bool:
    """Tells whether a model's own settings limit the length by an option of transformers'.

    Its default for `max_length`, 20, doesn't count where it came with all other defaults: Seq2SeqTrainer writes them.
    """
    longest = own.get("max_length")
    if own.get("max_new_tokens") is not None or longest not in (None, DEFAULT_MAX_LENGTH):
        return True
    filled_in = [own.get(name) is not None for name in FILLED_IN]
    if longest is None or all(filled_in):
        return False
    if any(filled_in):
        _warn_once(
            f"`max_length` of the model's generation config is {DEFAULT_MAX_LENGTH} and ends translations early. A "
            "Trainer may have written it; here it counts. Set it to None to let `max_extra_length` count."
        )
    return True


@functools.cache
def _warn_once(message: str) -> None:
    logger.warning(message)


__all__ = ["GNMTLengthPenalty", "Plan"]
