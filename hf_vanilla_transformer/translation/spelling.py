"""Texts of what a model writes, and what becomes of its unknown tokens."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import did_you_mean
from ..plan_vanilla_transformer import Plan
from .ctranslate2_folder import PieceTokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

HOW = {"mark": "the translations show each as {token}", "drop": "they are left out of the translations"}


@dataclass(frozen=True)
class Spelling:
    """Spells tokens of the target."""

    tokenizer: "PreTrainedTokenizerBase"
    how: str  # "mark", "drop" or "avoid" unknown tokens, as for a `Call`
    unknown: int | None  # None: there is none, or it has another purpose as well, such as to end sentences

    @classmethod
    def of(cls, tokenizer: "PreTrainedTokenizerBase", own: object, how: str | None = None) -> "Spelling":
        """Finds the unknown token, by a model's `own` generation config; raises `ValueError` for a wrong `how`."""
        if (how := how or "mark") not in (*HOW, "avoid"):
            known = (*HOW, "avoid")
            raise ValueError(f"unknown_target is {how!r}; give one of {', '.join(known)}{did_you_mean(how, known)}")
        if (unknown := unknown_of_target(tokenizer)) is not None:
            plan = Plan.of({}, own)
            others = {*plan.ends, plan.padding, plan.start, tokenizer.pad_token_id, tokenizer.eos_token_id}
            unknown = None if unknown in others else unknown
        return cls(tokenizer, how, unknown)

    @property
    def barred(self) -> tuple[int, ...]:
        """Tokens that the model never chooses."""
        return () if self.unknown is None or self.how != "avoid" else (self.unknown,)

    def text(self, tokens: Sequence[int]) -> str:
        """Returns the text of tokens, on one line: special ones spell nothing."""
        kept, shows = list(tokens), self.count(tokens) > 0 and self.how != "drop"
        if shows:
            kept = [one for one in kept if one == self.unknown or one not in self._special]
        elif self.how == "drop":
            kept = [one for one in kept if one != self.unknown]
        text: str = self.tokenizer.decode(kept, skip_special_tokens=not shows)
        return text.replace("\r", " ").replace("\n", " ")

    @property
    def _special(self) -> set[int]:
        added = self.tokenizer.added_tokens_decoder.items()
        return {*self.tokenizer.all_special_ids, *(number for number, one in added if one.special)}

    def count(self, tokens: Sequence[int]) -> int:
        """Counts the unknown tokens."""
        return 0 if self.unknown is None else list(tokens).count(self.unknown)

    def warn(self, counts: Sequence[int]) -> None:
        """Logs how many unknown tokens translations have, if any; `counts` are those of each."""
        if total := sum(counts):
            where = f"in {sum(map(bool, counts)):,} of {len(counts):,} translations"
            what = HOW.get(self.how, HOW["mark"]).format(token=self.tokenizer.convert_ids_to_tokens(self.unknown))
            logger.warning(
                f"The model wrote its unknown token {total:,} time{'' if total == 1 else 's'}, {where}: {what} "
                '(unknown_target="avoid": it is never chosen).'
            )


def unknown_of_target(tokenizer: "PreTrainedTokenizerBase | PieceTokenizer") -> int | None:
    """Returns the id of the unknown token of targets, which may have a vocabulary of their own; None: there is none."""
    if isinstance(tokenizer, PieceTokenizer):
        return tokenizer.unknown_target
    if getattr(tokenizer, "unk_token_id", None) is None and not getattr(tokenizer, "separate_vocabs", False):
        return None
    from ..data.symbols import unknown_ids  # it needs transformers

    return unknown_ids(tokenizer)[1]
