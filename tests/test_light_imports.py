"""The classes are registered when transformers is imported, and an exported model is translated without it."""

import importlib
import json
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from unittest.mock import Mock

import pytest
from transformers import AutoTokenizer

from hf_vanilla_transformer import cli, registration
from hf_vanilla_transformer.translation.tokenizer_file import ONLY_IDS, TokenizerFile, open_tokenizer
from hf_vanilla_transformer.translation.translator import Translator

LIGHT = "import sys; assert not {'torch', 'transformers', 'huggingface_hub'} & set(sys.modules)\n"
KNOWN = "from transformers import AutoConfig; AutoConfig.for_model('vanilla_transformer')\n"
GONE = "import sys; assert not [one for one in sys.meta_path if type(one).__name__ == 'Registration']\n"
OURS = "import hf_vanilla_transformer as ours, importlib.util\n"
IN_ANY_ORDER = {
    "later": f"{OURS}ours.Translator\n{LIGHT}importlib.util.find_spec('transformers'); importlib.reload(ours)\n{LIGHT}"
    "import transformers\nassert type(transformers.__spec__.loader).__module__ == '_frozen_importlib_external'\n"
    "from transformers.pipelines import PIPELINE_REGISTRY as tasks; tasks.supported_tasks['vanilla-translation']\n"
    "importlib.reload(transformers); importlib.reload(ours)\n",
    "threads": f"{OURS}from concurrent.futures import ThreadPoolExecutor\n"
    "names = 2 * ['transformers.models.auto.modeling_auto', 'transformers', *ours.registration.OWN]\n"
    "with ThreadPoolExecutor(12) as pool: list(pool.map(importlib.import_module, names))\n"
    "from transformers.models.auto.modeling_auto import AutoModelForSeq2SeqLM as Auto\n"
    "assert ours.VanillaTransformerConfig in Auto._model_mapping\n",
    "spawned": "import multiprocessing, hf_vanilla_transformer.generation_vanilla_transformer\n"
    "from hf_vanilla_transformer import VanillaTransformerConfig\n"
    "with multiprocessing.get_context('spawn').Pool(1) as pool: pool.map(repr, [VanillaTransformerConfig()])\n",
}  # fmt: skip


def run(script, *arguments):
    return subprocess.check_output([sys.executable, "-c", script, *map(str, arguments)], text=True)


MANY = [pytest.param(name, marks=pytest.mark.hard) for name in ("threads", "spawned")]


@pytest.mark.parametrize("order", ["later", *MANY])
def test_transformers_knows_the_classes(order):
    run(IN_ANY_ORDER[order] + GONE + KNOWN)


NAMES = ("watched_library", "watched_module")


@pytest.fixture
def register(tmp_path, monkeypatch):
    """What is called when a small library has been imported, in place of transformers."""
    register = Mock()
    (tmp_path / "watched_library.py").write_text("import time; time.sleep(0.1)\n")
    (tmp_path / "watched_module.py").write_text("import watched_library\nCONTENT = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registration, "LIBRARY", NAMES[0])
    monkeypatch.setattr(registration, "OWN", NAMES[1:])
    monkeypatch.setattr(sys, "meta_path", [registration.Registration(register), *sys.meta_path])
    yield register
    for name in NAMES:
        sys.modules.pop(name, None)


@pytest.mark.parametrize("first", NAMES)
def test_an_error_of_registering_is_that_of_the_import(register, first):
    register.side_effect = [ValueError("no such class"), None]
    for outcome in (pytest.raises(ValueError, match="no such class"), nullcontext()):
        assert type(sys.meta_path[0]) is registration.Registration
        for name in NAMES:
            sys.modules.pop(name, None)
        with outcome:
            importlib.import_module(first)
    assert type(sys.meta_path[0]) is not registration.Registration


def test_threads_that_import_at_once_register_once(register):
    with ThreadPoolExecutor(8) as pool:
        modules = list(pool.map(importlib.import_module, 4 * NAMES))
    assert [module.CONTENT for module in modules[1::2]] == [1] * 4
    register.assert_called_once_with()
    assert type(sys.meta_path[0]) is not registration.Registration


# ---- Exported models ----
LINES = ["It is half past nine. twenty-one", "", "e\u0301 \u200b 漢字 </s> <pad", "  the\tMay", "\U0001f600 <s>a"]


@pytest.fixture(scope="module")
def exported(tiny_checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported") / "model"
    assert cli.main(["export", "--model", str(tiny_checkpoint), "--to", "ctranslate2", "--output", str(folder)]) == 0
    return folder


@pytest.mark.parametrize("splits", [True, False])
def test_a_file_of_a_tokenizer_reads_and_writes_as_the_tokenizer(exported, tmp_path, splits):
    folder = shutil.copytree(exported, tmp_path / "model")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"split_special_tokens": splits}))
    light, complete = open_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    assert type(light) is TokenizerFile
    for options in ({}, {"add_special_tokens": False}):
        ids = complete(LINES, **ONLY_IDS, **options)["input_ids"]
        assert light(LINES, **ONLY_IDS, **options) == {"input_ids": ids}
        assert light(text_target=LINES, **ONLY_IDS, **options) == {"input_ids": ids}
    for row in [*ids, *([number, 1] for number in range(len(complete) + 2))]:
        assert light.decode(row, skip_special_tokens=True) == complete.decode(row, skip_special_tokens=True)
    assert light.get_vocab() == complete.get_vocab()
    assert set(light.all_special_ids) == set(complete.all_special_ids)
    assert (light.model_max_length, len(light)) == (complete.model_max_length, len(complete))
    assert "_complete" not in vars(light)
    assert light.eos_token == "</s>"  # what the complete one has, it has too
    with pytest.raises(ValueError, match="surrogate"):
        light(["\ud800"], **ONLY_IDS)
    complete.add_tokens(["<2de>"])  # rules of its own
    complete.save_pretrained(tmp_path)
    assert type(open_tokenizer(tmp_path)) is type(complete)


def test_an_exported_model_is_translated_without_pytorch(exported):
    heavy = Translator(exported, "cpu")
    heavy.tokenizer = AutoTokenizer.from_pretrained(exported)
    options = [{}, {"num_beams": 2}, {"num_beams": 3, "n_best": 2}, {"split_sentences": "en"}, {"prefix": "der"}]
    script = f"{OURS}import sys; translator = ours.Translator(sys.argv[1], 'cpu'); repr(translator)\n{LIGHT}"
    script += f"print([translator({LINES!r}, **one) for one in {options!r}])\n{LIGHT}"
    assert run(script, exported) == f"{[heavy(LINES, **one) for one in options]}\n"


# ---- Where they aren't installed ----
WITHOUT = """
import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name in ("torch", "transformers"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Hidden())
"""
SERVE = """
import asyncio
from concurrent.futures import ThreadPoolExecutor
from hf_vanilla_transformer import Translator
from hf_vanilla_transformer.serving import app, models, server
with ThreadPoolExecutor(1) as thread:
    batcher = models.batcher_of(Translator(sys.argv[1], "cpu"), [("en", "de")], thread=thread)
    print(asyncio.run(batcher.translate(["It is."], source="en", target="de"))[0][0].text)
"""
FILES = {
    "lines.txt": "It is half past nine.\n\nShe goes.\n",
    "rows.jsonl": '{"text": "It is half past nine. She goes."}\n',
    "page.html": '<html lang="en"><title>Time</title><p>It is <b>half</b> past nine. She goes.</p></html>\n',
}


def test_an_exported_model_translates_files_and_serves_where_pytorch_is_not_installed(exported, tmp_path):
    pytest.importorskip("fastapi")
    script = f"{WITHOUT}from hf_vanilla_transformer.cli import main\n"
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
        command = ["translate", "--model", str(exported), "--input", str(tmp_path / name), "--output"]
        script += f"assert main({[*command, str(tmp_path / f'out-{name}')]}) == 0\n"
        assert cli.main([*command, str(tmp_path / f"wanted-{name}")]) == 0
    assert run(script + SERVE, exported).endswith(f"{Translator(exported, 'cpu')('It is.')}\n")
    for name in FILES:
        assert (tmp_path / f"out-{name}").read_bytes() == (tmp_path / f"wanted-{name}").read_bytes() != b""


def test_what_to_install_is_said(exported, tiny_checkpoint, tmp_path):
    (tmp_path / "lines.txt").write_text("a\n")
    evaluate = ["evaluate", *(f"--{side}={tmp_path / 'lines.txt'}" for side in ("source", "reference"))]
    script = f"{WITHOUT}from hf_vanilla_transformer.cli import main\nsys.stderr = sys.stdout\n"
    for command in ([*evaluate, "--model", str(exported)], ["translate", "a", "--model", str(tiny_checkpoint)]):
        script += f"assert main({command}) == 2\n"
    said = run(script).splitlines()
    fix = "which isn't installed: run pip install . in a checkout of hf_vanilla_transformer"
    lines = [f"vanilla-transformer: error: this needs {name}, {fix}" for name in ("torch", "transformers")]
    assert len(said) == 2
    assert set(said) <= set(lines)
