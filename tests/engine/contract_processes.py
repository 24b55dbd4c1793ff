"""Run as a script by test_contract_processes.py: patches that are made before the package is imported, and code copies.

A child is forked for each case of a process that has torch and transformers, and not yet the package. The last line of
the output is a table of cases, as JSON: None, or what went wrong.
"""

import contextlib
import importlib
import inspect
import io
import json
import logging
import os
import shutil
import sys
import traceback
from pathlib import Path

import torch.nn.functional as F
import transformers
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForSeq2SeqLM, masking_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward

PACKAGE = "hf_vanilla_transformer"


def rolled(original):
    def patched(*args, **kwargs):
        return original(*args, **kwargs).roll(1, -1)

    return patched


def my_attention(*args, **kwargs):
    heads, weights = sdpa_attention_forward(*args, **kwargs)
    return heads.roll(1, -1), weights


def my_mask(*args, **kwargs):
    return masking_utils.sdpa_mask(*args, **kwargs | {"attention_mask": None})


def visible_padding(original):
    def patched(*args, **kwargs):
        given = inspect.signature(original).bind(*args, **kwargs)
        given.arguments["attention_mask"] = None
        return original(*given.args, **given.kwargs)

    return patched


def patch(target, name, wrapper):
    setattr(target, name, wrapper(getattr(target, name)))


def own(path):
    """A class or function of the package's modeling, which has to be imported for it."""
    module = importlib.import_module(f"{PACKAGE}.modeling_vanilla_transformer")
    return getattr(module, path)


PATCHES = {
    "nn.Linear.forward": lambda: patch(nn.Linear, "forward", rolled),
    "nn.LayerNorm.forward": lambda: patch(nn.LayerNorm, "forward", rolled),
    "nn.Embedding.forward": lambda: patch(nn.Embedding, "forward", rolled),
    "F.linear": lambda: patch(F, "linear", rolled),
    "F.layer_norm": lambda: patch(F, "layer_norm", rolled),
    "F.embedding": lambda: patch(F, "embedding", rolled),
    "F.scaled_dot_product_attention": lambda: patch(F, "scaled_dot_product_attention", rolled),
    "create_bidirectional_mask": lambda: patch(masking_utils, "create_bidirectional_mask", visible_padding),
    "sdpa registered": lambda: AttentionInterface.register("sdpa", my_attention),
    "mask registered": lambda: AttentionMaskInterface.register("sdpa", my_mask),
    "code of sdpa_attention_forward": lambda: setattr(
        sdpa_attention_forward, "__code__", (lambda module, q, k, v, mask, **kw: (q.transpose(1, 2) * 0, None)).__code__
    ),
}
# A name that modeling has imported is its own from then on.
BEFORE_THE_IMPORT_ALONE = {"create_bidirectional_mask"}
LATE_PATCHES = {
    "feed-forward": lambda: patch(own("VanillaTransformerFeedForward"), "forward", rolled),
    "embed": lambda: patch(own("VanillaTransformerStack"), "embed", rolled),
}


def reference():
    """The helpers of the tests, which import the package."""
    return importlib.import_module("contract")


def compare(before_generating=False, apply=None, changes_output=True):
    contract = reference()
    model = contract.new_model()
    if not before_generating:
        contract.generated(model, length=4)
    if apply is not None:
        apply()
    found, expected = contract.generated(model), contract.naive(model)
    assert found == expected, f"generated {found}, expected {expected}"
    with open(os.environ["CONTRACT_PLAIN"]) as file:
        assert (found != json.load(file)) == changes_output, "the output is as without the patch"


def early(apply):
    apply()
    compare()


def late(apply):
    compare(before_generating=True, apply=apply)


# ---- Code that a checkpoint brings along ----
EDITS = {
    "unchanged": ("", "", False),
    "comment": ("# ---- 3.5 Positional encoding ----", "# ---- Positions ----", False),
    "feed-forward": (
        "return self.fc2(self.dropout(self.activation(self.fc1(x))))",
        "return self.fc2(self.dropout(self.activation(self.fc1(x)))).roll(1, -1)",
        True,
    ),
    "eq. 1": ("key.transpose(-2, -1)) * scaling", "key.transpose(-2, -1)) * (-4 * scaling)", True),
    "positions": ("sin, cos = angles.sin(), angles.cos()", "sin, cos = angles.cos(), angles.sin()", True),
    "residual": ("return super().forward(x + self.dropout(sublayer(x)))", "return super().forward(sublayer(x))", True),
}


def run_copy(edit, engine):
    """Loads a checkpoint's own code; `engine` "package": with the package imported afterwards and its slot filled."""
    original = Path(os.environ["CONTRACT_CHECKPOINT"])
    name = f"{edit} {engine}".replace(" ", "_").replace(".", "").replace("-", "_")
    source = shutil.copytree(original, original.parent / name)  # by its name, transformers caches the code
    old, new, changes_output = EDITS[edit]
    path = source / "modeling_vanilla_transformer.py"
    text = path.read_text()
    assert old in text, f"{old} isn't in the code"
    path.write_text(text.replace(old, new))
    model = AutoModelForSeq2SeqLM.from_pretrained(source, trust_remote_code=True).eval()
    model.set_attn_implementation("eager")
    module = sys.modules[type(model).__module__]
    assert PACKAGE not in type(model).__module__.split(".")
    assert module.EngineSlot.engine is None
    contract = reference()
    if engine == "package":
        slot = importlib.import_module(f"{PACKAGE}.generation_vanilla_transformer").EngineSlot
        module.EngineSlot.engine = slot.engine
    contract.generated(model, length=4)
    found, expected = contract.generated(model), contract.naive(model)
    assert found == expected, f"generated {found}, expected {expected}"
    if engine == "package" and slot.engine is not None and changes_output:
        engine_module = importlib.import_module(f"{PACKAGE}.engine")
        assert engine_module.unsupported_reason(model) is not None, "the engine speaks for another code"
    with open(os.environ["CONTRACT_PLAIN"]) as file:
        assert (found != json.load(file)) == changes_output, "the edit counts where it shouldn't, or not"


# ---- What is logged ----
def logged_once():
    contract = reference()
    if not contract.has_engine():
        return "skipped"
    records = []
    handler = logging.Handler(logging.DEBUG)
    handler.emit = lambda record: records.append(record.getMessage())
    for name in ("", PACKAGE, "transformers"):
        logging.getLogger(name).addHandler(handler)
    logging.getLogger(PACKAGE).setLevel(logging.DEBUG)
    engine = importlib.import_module(f"{PACKAGE}.engine")
    model = contract.new_model()
    assert not [text for text in records if "engine" in text.lower()], records
    model.lm_head.register_forward_hook(lambda module, args, output: output)
    reason = engine.unsupported_reason(model)
    for _ in range(3):
        contract.generated(model, length=3)
    messages = {id(text): text for text in records if reason in text}  # several handlers may get one record
    count = sum(reason in text for text in records)
    assert messages, f"{reason!r} isn't logged, only {records}"
    assert count <= 3, f"{reason!r} is logged {count} times to three handlers"
    return None


def cases():
    for name, apply in PATCHES.items():
        yield f"early: {name}", lambda apply=apply: early(apply)
        if name not in BEFORE_THE_IMPORT_ALONE:
            yield f"late: {name}", lambda apply=apply: late(apply)
    for name, apply in LATE_PATCHES.items():
        yield f"early: {name}", lambda apply=apply: early(apply)
        yield f"late: {name}", lambda apply=apply: late(apply)
    for edit in EDITS:
        yield f"copy: {edit}", lambda edit=edit: run_copy(edit, "none")
        yield f"copy with the package's engine: {edit}", lambda edit=edit: run_copy(edit, "package")
    yield "logged once", logged_once


def in_a_child(case):
    """Runs a case in a forked process and returns None, "skipped", or the traceback."""
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.close(reader)
        try:
            result = case()
        except BaseException:
            result = traceback.format_exc()
        with os.fdopen(writer, "w") as file:
            json.dump(result, file)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        text = file.read()
    os.wait()
    return json.loads(text) if text else "the process died"


def main():
    assert PACKAGE not in sys.modules, "the package is imported already"
    transformers.logging.set_verbosity_error()
    chosen = sys.argv[1:]
    with contextlib.redirect_stdout(io.StringIO()):
        results = {name: in_a_child(case) for name, case in cases() if not chosen or name in chosen}
    sys.stdout.write(json.dumps(results) + "\n")


if __name__ == "__main__":
    main()
