"""What tests of pushing share: a client that asks a Hub on localhost, and a trainer that pushes."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import huggingface_hub.constants as constants
import torch
import transformers.utils.hub
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

import hf_vanilla_transformer
from hf_vanilla_transformer import VanillaTransformerTrainer, VanillaTransformerTrainingArguments

TOKEN, OTHERS_TOKEN = "hf_" + "Mine" * 9, "hf_" + "Else" * 9
REPO = "me/model"
PACKAGE = Path(hf_vanilla_transformer.__file__).parent
SENTENCES = ["twenty-one", "half past nine", "Überraschung: 🙂"]

LOADING = """
import json, sys

hide, results = sys.argv[1] == "hidden", {}
if hide:
    class Hidden:
        def find_spec(self, name, path=None, target=None):
            if name.startswith("hf_vanilla_transformer"):
                raise ImportError(name + " is hidden")

    sys.meta_path.insert(0, Hidden())
else:
    import hf_vanilla_transformer
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

for repo, revision in json.loads(sys.argv[2]):
    where = {"revision": revision, **({"trust_remote_code": True} if hide else {})}
    tokenizer = AutoTokenizer.from_pretrained(repo, **where)
    model, report = AutoModelForSeq2SeqLM.from_pretrained(repo, output_loading_info=True, **where)
    assert not report["missing_keys"] and not report["unexpected_keys"], report
    assert type(model).__module__.startswith("transformers_modules" if hide else "hf_vanilla_transformer"), model
    batch = tokenizer(SENTENCES, text_target=SENTENCES, padding=True, return_tensors="pt")
    with torch.no_grad():
        results[f"{repo}@{revision}"] = model.eval()(**batch).logits
torch.save(results, sys.argv[3])
"""


def connect(patch, endpoint):
    """Lets this process's client ask a hub, although the tests are offline."""
    values = {"ENDPOINT": endpoint, "HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_XET": True}
    values["HUGGINGFACE_CO_URL_TEMPLATE"] = f"{endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    for name, value in values.items():
        patch.setattr(constants, name, value)
    patch.setattr(transformers.utils.hub, "_hf_api", None)
    patch.setattr(time, "sleep", lambda seconds: None)  # between two attempts
    patch.setenv("HF_TOKEN", TOKEN)


def logits_in_a_new_process(hub, how, models, folder):
    """The logits of models on the hub; with the package "hidden" or "installed"."""
    result = folder / f"{how}.pt"
    script = f"SENTENCES = {SENTENCES!r}\n{LOADING}"
    options = ["-I"] if how == "hidden" else []
    command = [sys.executable, *options, "-c", script, how, json.dumps(models), str(result)]
    variables = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    variables |= {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(folder / f"home-{how}"), "HF_HUB_DISABLE_XET": "1"}
    variables |= {"HF_HUB_DISABLE_TELEMETRY": "1", "HF_TOKEN": TOKEN, "PYTHONPATH": str(PACKAGE.parent)}
    run = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=280, check=False)
    assert run.returncode == 0, run.stderr
    return torch.load(result)


def logits_of(folder):
    tokenizer, model = (auto.from_pretrained(folder) for auto in (AutoTokenizer, AutoModelForSeq2SeqLM))
    batch = tokenizer(SENTENCES, text_target=SENTENCES, padding=True, return_tensors="pt")
    with torch.no_grad():
        return model.eval()(**batch).logits


def change_weights(folder):
    model = AutoModelForSeq2SeqLM.from_pretrained(folder)
    with torch.no_grad():
        model.get_input_embeddings().weight[7] += 1
    model.save_pretrained(folder)


def the_error(err):
    """The one line of an error."""
    (line,) = err.splitlines()
    assert line.startswith("vanilla-transformer: error: ")
    return line.removeprefix("vanilla-transformer: error: ")


def trainer_of(checkpoint, output, **options):
    arguments = VanillaTransformerTrainingArguments(output_dir=str(output), max_steps=0, **options)
    tokenizer, model = (auto.from_pretrained(checkpoint) for auto in (AutoTokenizer, AutoModelForSeq2SeqLM))
    return VanillaTransformerTrainer(model=model, args=arguments, processing_class=tokenizer)
