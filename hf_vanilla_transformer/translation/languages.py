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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ..errors import did_you_mean, named
from ..plan_vanilla_transformer import LENGTHS, Plan, settings_in
from .backend import Backend
from .reading import CODES_PER_ERROR, READING, check_target_codes, target_code

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

# Classes of tokenizers that have languages, and the option of `generate()` that tells the target's.
FAMILIES = {
    **dict.fromkeys(("NllbTokenizer", "M2M100Tokenizer", "MBart50Tokenizer"), "forced_bos_token_id"),
    "MBartTokenizer": "decoder_start_token_id",
}


def known_languages(tokenizer: "PreTrainedTokenizerBase") -> dict[str, int]:
    """Returns the languages of a tokenizer of these families with the ids of their tokens; of another one, none."""
    if _target_option(tokenizer) is None:
        return {}
    codes = dict(getattr(tokenizer, "lang_code_to_id", None) or {})
    if hasattr(tokenizer, "lang_code_to_token"):  # M2M100's names aren't its tokens, so it can't be given others
        return codes
    others, added = set(tokenizer.special_tokens_map.values()), tokenizer.added_tokens_decoder.items()
    return codes | {one.content: number for number, one in added if one.special and one.content not in others}


def target_of(tokenizer: "PreTrainedTokenizerBase", backend: Backend, options: Mapping[str, Any]) -> str | None:
    """Returns the target language that a call's own options for `generate()` choose, or None; raises `ValueError`."""
    if (option := _target_option(tokenizer)) is None:
        return None
    languages = known_languages(tokenizer)
    if (number := options.get(option)) is None:
        number = settings_in(options.get("generation_config")).get(option)
        if number in (None, settings_in(backend.generation_config).get(option)):  # a copy of the model's chooses none
            return None
    if (name := next((name for name, one in languages.items() if one == number), None)) is None:
        raise ValueError(f"{option} is {number!r}, no language; give tgt_lang, one of {_shown(languages)}")
    return name


@contextmanager
def set_languages(
    tokenizer: "PreTrainedTokenizerBase",
    backend: Backend,
    options: dict[str, Any],  # of the call, for `generate()`
    texts: Sequence[str],
    first: int = 0,  # the index of the first text, for errors
    *,
    src_lang: str | None = None,  # None: the tokenizer's own, if it was opened with one
    tgt_lang: str | None = None,  # None: that of the options, the tokenizer or the generation config
    source_prefix: str | None = None,
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Lets a tokenizer read texts of two languages. Afterwards it has its own again; other threads wait until then.

    Yields what sources begin with, and the options with those that tell the languages. A model that lacks a language,
    or has several where none is given or options choose another one, raises `ValueError`.
    """
    check_target_codes(tokenizer, texts, first, needed=tgt_lang is None)
    if languages := known_languages(tokenizer):
        if source_prefix:
            raise ValueError("source_prefix is for other models; this one's languages are src_lang and tgt_lang")
        with READING, _switched(tokenizer, languages, backend, options, src_lang, tgt_lang) as told:
            yield "", {**options, **told}
        return
    begin, settings = _beginning(tokenizer, backend.tasks, src_lang, tgt_lang)
    if begin and source_prefix:
        raise ValueError("tgt_lang and source_prefix both say what sources begin with; give one of the two")
    if backend.tasks and not begin and source_prefix is None:
        _warn_of_tasks(tuple(backend.tasks))
    given = {**settings_in(options.get("generation_config")), **options}
    if any(given.get(name) is not None for name in LENGTHS):
        settings.pop("max_length", None)
    if given.get("num_beams") == 1:
        settings.pop("early_stopping", None)
    settings = {name: value for name, value in settings.items() if name not in given}
    yield begin or source_prefix or "", {**settings, **options}


def _target_option(tokenizer: "PreTrainedTokenizerBase") -> str | None:
    return next((FAMILIES[one.__name__] for one in type(tokenizer).__mro__ if one.__name__ in FAMILIES), None)


@contextmanager
def _switched(
    tokenizer: Any,
    languages: dict[str, int],
    backend: Backend,
    options: dict[str, Any],
    src_lang: str | None,
    tgt_lang: str | None,
) -> Iterator[dict[str, Any]]:
    """Switches a tokenizer to two languages, and yields the option that tells the target's."""
    option, own = str(_target_option(tokenizer)), (tokenizer.src_lang, tokenizer.tgt_lang)
    by_call = target_of(tokenizer, backend, options)
    if tgt_lang and by_call and by_call != tgt_lang:
        raise ValueError(f"tgt_lang is {tgt_lang!r}, and {option} says {by_call!r}; give one of the two")
    plan, names = Plan.of(options, backend.generation_config), {number: name for name, number in languages.items()}
    by_plan = names.get(plan.forced_begin if option.startswith("forced") else plan.start)  # type: ignore[arg-type]
    # To these tokenizers, a source of which nothing is said is English, and such a target is what the source is.
    source = src_lang or (own[0] if tokenizer.init_kwargs.get("src_lang") else None)
    by_tokenizer = own[1] if own[1] != own[0] else None
    target = tgt_lang or by_call or by_tokenizer or by_plan
    for name, value in {"src_lang": source, "tgt_lang": target}.items():
        if value is None:
            raise ValueError(f"the model has several languages: give {name}, one of {_shown(languages)}")
        if value not in languages:
            hint = did_you_mean(value, languages)
            raise ValueError(f"{name} is {value!r}, but the model's languages are {_shown(languages)}{hint}")
    number = languages[str(target)]
    if tokenizer.decode([number], skip_special_tokens=True):  # as when M2M100's tokenizer is made of its files
        raise ValueError(
            f"the tokenizer's languages aren't special tokens, so that translations would begin with {target!r}; open "
            "it with them as additional_special_tokens"
        )
    try:
        tokenizer.src_lang, tokenizer.tgt_lang = source, target
        yield {option: number}
    finally:
        tokenizer.src_lang, tokenizer.tgt_lang = own


def _beginning(
    tokenizer: "PreTrainedTokenizerBase", tasks: Mapping[str, Any], src_lang: str | None, tgt_lang: str | None
) -> tuple[str, dict[str, Any]]:
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
        return settings.pop("prefix", ""), settings
    if src_lang is not None:
        raise ValueError(f"src_lang is {src_lang!r}, but the model isn't told the source language; leave it out")
    return f"{target_code(tokenizer, str(tgt_lang))} ", {}


def _shown(languages: Iterable[str]) -> str:
    return named(languages, CODES_PER_ERROR)


@functools.cache
def _warn_of_tasks(tasks: tuple[str, ...]) -> None:
    logger.warning(
        f"The model has been trained for {named(tasks)}, each with a prefix: give src_lang and tgt_lang, or "
        'source_prefix ("" for none).'
    )
