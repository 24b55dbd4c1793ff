"""What tests of pushing share: a client that asks a Hub on localhost, and a trainer that pushes."""

import os
import time

import huggingface_hub.constants as constants
import transformers.utils.hub
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from hf_vanilla_transformer import VanillaTransformerTrainer, VanillaTransformerTrainingArguments

TOKEN, OTHERS_TOKEN = "hf_" + "Mine" * 9, "hf_" + "Else" * 9
REPO = "me/model"


def environment(hub, home, token=TOKEN):
    """The variables of a new process that asks the hub."""
    own = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    return {**kept, **own, "HF_HUB_DISABLE_TELEMETRY": "1", **({"HF_TOKEN": token} if token else {})}


def connect(patch, endpoint, token=TOKEN):
    """Lets this process's client ask a hub, although the tests are offline."""
    values = {"ENDPOINT": endpoint, "HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_XET": True}
    values["HUGGINGFACE_CO_URL_TEMPLATE"] = f"{endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    for name, value in values.items():
        patch.setattr(constants, name, value)
    patch.setattr(transformers.utils.hub, "_hf_api", None)
    patch.setattr(time, "sleep", lambda seconds: None)  # between two attempts
    if token:
        patch.setenv("HF_TOKEN", token)
    else:
        patch.delenv("HF_TOKEN", raising=False)


def the_error(err):
    """The one line of an error."""
    (line,) = err.splitlines()
    assert line.startswith("vanilla-transformer: error: ")
    return line.removeprefix("vanilla-transformer: error: ")


def trainer_of(checkpoint, output, **options):
    arguments = VanillaTransformerTrainingArguments(output_dir=str(output), max_steps=0, **options)
    tokenizer, model = (auto.from_pretrained(checkpoint) for auto in (AutoTokenizer, AutoModelForSeq2SeqLM))
    return VanillaTransformerTrainer(model=model, args=arguments, processing_class=tokenizer)
