"""Models of several languages: how each family is told what to translate from and into.

| family | source | target |
|---|---|---|
| NLLB, M2M100, mBART-50 | its tokenizer puts the language first | the first token is forced |
| mBART | its tokenizer puts the language last | the decoder starts with it |
| OPUS-MT | | the source begins with a code, such as ">>deu<<" |
| T5 | the source begins with the prefix of a task in config.json | the same |

For all others, `source_prefix` is what each source begins with.
"""

import functools
import logging
import os
import re
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..errors import did_you_mean, named
from ..plan_vanilla_transformer import LENGTHS, Plan, settings_in

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

# Classes of tokenizers that have languages, and the option of `generate()` that tells the target's.
FAMILIES = {
    **dict.fromkeys(("NllbTokenizer", "M2M100Tokenizer", "MBart50Tokenizer"), "forced_bos_token_id"),
    "MBartTokenizer": "decoder_start_token_id",
}
# The target language at the beginning of a text, ">>deu<<", for a model with several.
CODE = re.compile(r"\s*(>>[^\s<>]+<<)")
CODES_PER_ERROR = 10
Tasks = Mapping[str, Mapping[str, object]]  # name -> settings, of which "prefix" is what sources begin with
# Held while any tokenizer reads texts: MarianTokenizer and the like switch to the target's side and back, and padding
# and truncation of the others are settings that one call after the other changes.
READING = threading.RLock()
if hasattr(os, "register_at_fork"):  # a forked process has no other thread that would release it
    os.register_at_fork(before=READING.acquire, after_in_parent=READING.release, after_in_child=READING.release)


@dataclass(frozen=True)
class Languages:
    """How a model is told the languages of a call."""

    asked: Mapping[str, str | None]  # `src_lang`, `tgt_lang` and `source_prefix` of the call, or else of its translator
    begin: str = ""  # what sources begin with
    settings: Mapping[str, object] = field(default_factory=dict)  # of `generate()`: the target's language, a task's
    pair: tuple[str, str] | None = None  # source and target, for a tokenizer that is switched to them

    @classmethod
    def of(
        cls,
        tokenizer: "PreTrainedTokenizerBase",
        asked: Mapping[str, str | None],  # of the call
        usual: Mapping[str, str | None],  # of its translator
        options: Mapping[str, object],  # of the call, for `generate()`
        own: object,  # the model's generation config
        tasks: Tasks,  # of a T5's configuration
    ) -> "Languages":
        """Raises `ValueError` for a language that a model lacks, or if it has several and none or two are given."""
        if known := known_languages(tokenizer):
            chosen = _target_of(tokenizer, known, options, own)
            asked = {**usual, **({"tgt_lang": chosen} if chosen else {}), **asked}
            asked = {**asked, "tgt_lang": asked["tgt_lang"] or chosen}
            if asked["source_prefix"]:
                raise ValueError("source_prefix is for other models; this one's languages are src_lang and tgt_lang")
            if chosen and asked["tgt_lang"] != chosen:
                name = _target_option(tokenizer)
                raise ValueError(f"tgt_lang is {asked['tgt_lang']!r}, and {name} says {chosen!r}; give one of the two")
            return _of_family(tokenizer, known, asked, Plan.of(options, own))
        asked = {**usual, **asked}
        source, target, prefix = (asked[name] for name in ("src_lang", "tgt_lang", "source_prefix"))
        begin, settings = _beginning(tokenizer, tasks, source, target)
        if begin and prefix:
            raise ValueError("tgt_lang and source_prefix both say what sources begin with; give one of the two")
        if tasks and not begin and prefix is None:
            _warn_of_tasks(tuple(tasks))
        given = {**settings_in(options.get("generation_config")), **options}
        if any(given.get(name) is not None for name in LENGTHS):
            settings.pop("max_length", None)
        if given.get("num_beams") == 1:
            settings.pop("early_stopping", None)
        return cls(asked, begin or prefix or "", {name: settings[name] for name in settings.keys() - given.keys()})

    def check(self, tokenizer: "PreTrainedTokenizerBase", texts: Iterable[str], first: int = 0) -> None:
        """Raises `ValueError` for a text whose code a model of several targets lacks, or that has none and needs it."""
        if not (codes := target_codes(tokenizer)):
            return
        for index, text in enumerate(texts, start=first):
            match = CODE.match(text)
            if match is None and self.asked["tgt_lang"] is None and text.strip():
                raise ValueError(
                    f"the model has several target languages, and sentences[{index}] doesn't say which; give tgt_lang, "
                    f"or begin the text with its code: {_shown(codes)}"
                )
            if match is not None and match[1] not in codes:
                raise ValueError(
                    f"sentences[{index}] begins with {match[1]}, but the model's codes are {_among(match[1], codes)}"
                )

    @contextmanager
    def read_by(self, tokenizer: "PreTrainedTokenizerBase") -> Iterator[None]:
        """Lets a tokenizer read texts of the two languages; other threads wait until it has its own again."""
        if self.pair is None:
            yield
            return
        with READING:
            own = tokenizer.src_lang, tokenizer.tgt_lang
            try:
                tokenizer.src_lang, tokenizer.tgt_lang = self.pair
                yield
            finally:
                tokenizer.src_lang, tokenizer.tgt_lang = own


# ---- Tokenizers that have languages ----
def known_languages(tokenizer: "PreTrainedTokenizerBase") -> dict[str, int]:
    """Returns the languages of a tokenizer of these families with the ids of their tokens; of another one, none."""
    if _target_option(tokenizer) is None:
        return {}
    codes = dict(getattr(tokenizer, "lang_code_to_id", None) or {})
    if hasattr(tokenizer, "lang_code_to_token"):  # M2M100's names aren't its tokens, so it can't be given others
        return codes
    others, added = set(tokenizer.special_tokens_map.values()), tokenizer.added_tokens_decoder.items()
    return codes | {one.content: number for number, one in added if one.special and one.content not in others}


def _target_option(tokenizer: "PreTrainedTokenizerBase") -> str | None:
    return next((FAMILIES[one.__name__] for one in type(tokenizer).__mro__ if one.__name__ in FAMILIES), None)


def _target_of(
    tokenizer: "PreTrainedTokenizerBase", known: Mapping[str, int], options: Mapping[str, object], own: object
) -> str | None:
    """Returns the target language that a call's own options for `generate()` choose, or None; raises `ValueError`."""
    option = str(_target_option(tokenizer))
    if (number := options.get(option)) is None:
        number = settings_in(options.get("generation_config")).get(option)
        if number in (None, settings_in(own).get(option)):  # a copy of the model's chooses none
            return None
    if (name := next((name for name, one in known.items() if one == number), None)) is None:
        raise ValueError(f"{option} is {number!r}, no language; give tgt_lang, one of {_shown(known)}")
    return name


def _of_family(
    tokenizer: "PreTrainedTokenizerBase", known: Mapping[str, int], asked: Mapping[str, str | None], plan: Plan
) -> Languages:
    """Returns the languages of a tokenizer that has some: those asked for, or else its own or the model's."""
    option = str(_target_option(tokenizer))
    with READING:  # another thread may have switched it
        own_source, own_target = tokenizer.src_lang, tokenizer.tgt_lang
    names = {number: name for name, number in known.items()}
    by_plan = names.get(plan.forced_begin if option.startswith("forced") else plan.start)  # type: ignore[arg-type]
    # To these tokenizers, a source of which nothing is said is English, and such a target is what the source is.
    by_tokenizer = own_target if own_target != own_source else None
    source = asked["src_lang"] or (own_source if tokenizer.init_kwargs.get("src_lang") else "")
    target = asked["tgt_lang"] or by_tokenizer or by_plan or ""
    for name, value in {"src_lang": source, "tgt_lang": target}.items():
        if not value:
            raise ValueError(f"the model has several languages: give {name}, one of {_shown(known)}")
        if value not in known:
            hint = did_you_mean(value, known)
            raise ValueError(f"{name} is {value!r}, but the model's languages are {_shown(known)}{hint}")
    if tokenizer.decode([known[target]], skip_special_tokens=True):  # as when M2M100's tokenizer is made of its files
        raise ValueError(
            f"the tokenizer's languages aren't special tokens, so that translations would begin with {target!r}; open "
            "it with them as additional_special_tokens"
        )
    return Languages(asked, settings={option: known[target]}, pair=(source, target))


# ---- What sources begin with ----
def _beginning(
    tokenizer: "PreTrainedTokenizerBase", tasks: Tasks, src_lang: str | None, tgt_lang: str | None
) -> tuple[str, dict[str, object]]:
    """Returns what sources begin with by the languages, and settings of a task."""
    if src_lang is None and tgt_lang is None:
        return "", {}
    if tasks:
        if (task := f"translation_{src_lang}_to_{tgt_lang}") not in tasks:
            raise ValueError(
                f"src_lang and tgt_lang are {src_lang!r} and {tgt_lang!r}, and the model's tasks are {named(tasks)}; "
                "give source_prefix for others"
            )
        settings = dict(tasks[task])
        return str(settings.pop("prefix", "")), settings
    if src_lang is not None:
        raise ValueError(f"src_lang is {src_lang!r}, but the model isn't told the source language; leave it out")
    return f"{_target_code(tokenizer, str(tgt_lang))} ", {}


def target_codes(tokenizer: "PreTrainedTokenizerBase") -> list[str]:
    """Returns the codes of a model with several target languages, ">>deu<<" and so on; none if it has only one."""
    return list(getattr(tokenizer, "supported_language_codes", None) or [])


def own_code(tokenizer: "PreTrainedTokenizerBase", text: str) -> re.Match[str] | None:
    """Finds the code of a target language at the beginning of a text for a model with several."""
    return CODE.match(text) if target_codes(tokenizer) else None


def _target_code(tokenizer: "PreTrainedTokenizerBase", tgt_lang: str) -> str:
    """Returns the code of a target language, given as "deu" or ">>deu<<"; raises `ValueError`."""
    codes, code = target_codes(tokenizer), tgt_lang if tgt_lang.startswith(">>") else f">>{tgt_lang}<<"
    if not codes:
        raise ValueError(
            f"tgt_lang is {tgt_lang!r}, but the tokenizer has no codes of target languages, such as >>deu<<; leave it "
            "out"
        )
    if code not in codes:
        raise ValueError(f"tgt_lang is {tgt_lang!r}, but the model's codes are {_among(code, codes)}")
    return code


def _shown(languages: Iterable[str]) -> str:
    return named(languages, CODES_PER_ERROR)


def _among(code: str, codes: list[str]) -> str:
    return _shown(codes) + did_you_mean(code, codes)


@functools.cache
def _warn_of_tasks(tasks: tuple[str, ...]) -> None:
    logger.warning(
        f"The model has been trained for {named(tasks)}, each with a prefix: give src_lang and tgt_lang, or "
        'source_prefix ("" for none).'
    )
