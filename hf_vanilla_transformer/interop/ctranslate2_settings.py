"""Which settings of a plan CTranslate2 has, without importing it, PyTorch or transformers."""

from collections.abc import Sequence

from ..plan_vanilla_transformer import GNMTLengthPenalty, Plan


def lacking_settings(plan: Plan) -> list[str]:
    """Returns the settings of a plan that CTranslate2 has no equivalent of, with their values."""
    settings = plan.settings()
    names = ["coverage_penalty", "no_repeat_ngram_size", "begin_suppress_tokens", "min_length"]
    names += ["repetition_penalty"] if plan.repetition_penalty != 1 else []
    names += ["bad_words_ids"] if any(len(one) > 1 for one in plan.barred_words) else []
    names += ["eos_token_id"] if len(plan.ends) > 1 else []
    others = [one for one in plan.others if not one.startswith("use_cache=")]  # it has its own
    return [*others, *(f"{name}={settings[name]!r}" for name in names if name in settings)]


def patience(plan: Plan) -> int:
    """Returns how many hypotheses for each beam end a search: one, as with `early_stopping=True`, or else two.

    With one, a search may end before its best hypothesis has. With two, 4,500 of 4,500 lines were translated as by the
    engine with `early_stopping=False`, and with one 4,347 (models of the quickstart, 4 beams).
    """
    return 1 if plan.num_beams == 1 or plan.early_stopping is True else 2


def never_chosen(plan: Plan, target: Sequence[str]) -> list[list[str]]:
    """Returns the tokens of the target that a plan bars, each as a list of one."""
    single = [one[0] for one in plan.barred_words if len(one) == 1]
    return [[target[token]] for token in sorted({*single, *plan.barred}) if token < len(target)]


def other_settings(plan: Plan) -> list[str]:
    """Returns the settings of a plan that `translate_batch` has no argument for, with their values."""
    found = lacking_settings(plan)
    if isinstance(plan.length_penalty, GNMTLengthPenalty):
        found.append(f"gnmt_length_penalty={float(plan.length_penalty)}")
    if plan.limit[0] == "max_extra_length":
        found.append(f"max_extra_length={plan.limit[1]}")
    forced = {"forced_bos_token_id": plan.forced_begin, "forced_eos_token_id": plan.forced_end or None}
    return sorted([*found, *(f"{name}={value!r}" for name, value in forced.items() if value is not None)])
