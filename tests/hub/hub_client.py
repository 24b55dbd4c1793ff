"""What tests of pushing share: a client that asks a Hub on localhost, and a trainer that pushes."""

import json
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

# Runs where the package can't be imported, in a process that has been offline until then.
LOADING = f"""
import json, sys
import huggingface_hub.constants as constants
import torch, transformers.utils.hub
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

settings, results, *models = sys.argv[1:]
for name, value in json.loads(settings).items():
    setattr(constants, name, value)
transformers.utils.hub._hf_api = None
logits = {{}}
for name in models:
    repo, revision = name.split("@")
    where = {{"revision": revision, "trust_remote_code": True}}
    tokenizer = AutoTokenizer.from_pretrained(repo, **where)
    model, report = AutoModelForSeq2SeqLM.from_pretrained(repo, output_loading_info=True, **where)
    assert not report["missing_keys"] and not report["unexpected_keys"], report
    assert type(model).__module__.startswith("transformers_modules"), model
    batch = tokenizer({SENTENCES!r}, text_target={SENTENCES!r}, padding=True, return_tensors="pt")
    with torch.no_grad():
        logits[name] = model.eval()(**batch).logits
torch.save(logits, results)
"""


def settings_of_client(endpoint, **others):
    template = f"{endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    values = {"ENDPOINT": endpoint, "HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_XET": True}
    return {**values, "HUGGINGFACE_CO_URL_TEMPLATE": template, **others}


def connect(patch, endpoint, cache):
    """Lets this process's client ask a hub, although the tests are offline."""
    for name, value in settings_of_client(endpoint, HF_HUB_CACHE=str(cache)).items():
        patch.setattr(constants, name, value)
    patch.setattr(transformers.utils.hub, "_hf_api", None)
    patch.setattr(time, "sleep", lambda seconds: None)  # between two attempts
    patch.setenv("HF_TOKEN", TOKEN)


def logits_without_the_package(run, hub, models, folder):
    """The logits of models on the hub, "user/name@revision"."""
    settings = json.dumps(settings_of_client(hub.endpoint, HF_HUB_CACHE=str(folder / "cache")))
    run(LOADING, folder, settings, folder / "logits.pt", *models)
    return torch.load(folder / "logits.pt")


def logits_of(source, **where):
    tokenizer, model = (auto.from_pretrained(source, **where) for auto in (AutoTokenizer, AutoModelForSeq2SeqLM))
    batch = tokenizer(SENTENCES, text_target=SENTENCES, padding=True, return_tensors="pt")
    with torch.no_grad():
        return model.eval()(**batch).logits


def change_weights(folder):
    model = AutoModelForSeq2SeqLM.from_pretrained(folder)
    with torch.no_grad():
        model.get_input_embeddings().weight[7] += 1
    model.save_pretrained(folder)


def trainer_of(checkpoint, output, **options):
    arguments = VanillaTransformerTrainingArguments(output_dir=str(output), max_steps=0, **options)
    tokenizer, model = (auto.from_pretrained(checkpoint) for auto in (AutoTokenizer, AutoModelForSeq2SeqLM))
    return VanillaTransformerTrainer(model=model, args=arguments, processing_class=tokenizer)
