"""Builds the wheel and the sdist, and proves both, and a model that is to be published, without the checkout.

    python -m scripts.release --output dist [--model outputs/my-run/averaged-10]

Each of the two is installed into a clean environment that then trains, translates and pushes from an empty folder; the
push goes to a Hub on localhost. Nothing is uploaded: CONTRIBUTING.md lists the steps for a person.
"""

import argparse
import importlib
import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from typing import Any

from hf_vanilla_transformer.hub.upload import prepare

from .quickstart.corpus import generate_pairs, split_pairs, write_corpus

ROOT = Path(__file__).parents[1]
COMMAND = ["-m", "hf_vanilla_transformer"]
TRAIN = [
    *("train", "--config", "multi30k_tiny", "own.yaml", "--data-dir", ".", "--output-dir", "run", "--max-steps", "20"),
    *("--vocab-size", "1000", "--eval-strategy", "no", "--save-steps", "20", "--average-last", "1"),
    *("--train-source", "train.en", "--train-target", "train.de"),
    *("--validation-source", "validation.en", "--validation-target", "validation.de"),
]
# A checkpoint's own code, in an environment that has transformers and not this package.
WITHOUT_PACKAGE = """
import sys, torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
folder = sys.argv[1]
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
model = AutoModelForSeq2SeqLM.from_pretrained(folder, trust_remote_code=True).eval()
ids = model.generate(**tokenizer(["a man rides a bicycle ."], return_tensors="pt"), max_new_tokens=5)
assert ids.shape[0] == 1 and "hf_vanilla_transformer" not in sys.modules, sys.modules.keys()
print("loads without the package:", tokenizer.batch_decode(ids, skip_special_tokens=True))
"""


def main() -> None:
    """Builds, proves, and prepares the model's folder; the first failure ends it with the command's output."""
    options = _options()
    options.output.mkdir(parents=True, exist_ok=True)
    for target in ("wheel", "sdist"):
        _run(sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(options.output.absolute()), cwd=ROOT)
    built = [max(options.output.glob(pattern), key=os.path.getmtime) for pattern in ("*.whl", "*.tar.gz")]
    with tempfile.TemporaryDirectory(prefix="release-") as folder:
        python = _environment(Path(folder) / "environment")
        for number, package in enumerate(built):
            print(f"{package.name}: installing it into a clean environment", flush=True)
            again = ["--force-reinstall", "--no-deps"] if number else []  # the dependencies are there
            constraints = ["--constraint", str(ROOT / "constraints.txt")]
            _run(str(python), "-m", "pip", "install", "--quiet", *constraints, *again, str(package.absolute()))
            _prove(python, Path(folder) / package.suffix.strip("."))
        if options.model is not None:
            _prove_model(python, options.model, Path(folder) / "model")


def _environment(folder: Path) -> Path:
    venv.create(folder, with_pip=True, clear=True)
    return folder / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")


def _prove(python: Path, place: Path) -> None:
    """Does in an empty folder what a user does first: train, look, translate, push."""
    write_corpus(place, split_pairs(generate_pairs(3_000), 100, 100))
    (place / "own.yaml").write_text("test_source: []\ntest_target: []\n", encoding="utf-8")
    own = [str(python), "-P", *COMMAND]
    where = _run(str(python), "-P", "-c", "import hf_vanilla_transformer as p; print(p.__file__)", cwd=place)
    assert ROOT not in Path(where.strip()).parents, f"the checkout's package is imported: {where}"
    _run(*own, *TRAIN, cwd=place)
    model = "run/averaged-1"
    print(_run(*own, "info", model, cwd=place).splitlines()[0])
    print("translates:", _run(*own, "translate", "--model", model, "It is half past nine.", cwd=place).strip())
    sys.path.insert(0, str(ROOT / "tests" / "hub"))
    server = importlib.import_module("hub_server")  # the Hub that the tests push to
    with server.running(server.LocalHub(someone="hf_release")) as hub:
        environment = {"HF_ENDPOINT": hub.endpoint, "HF_TOKEN": "hf_release", "HF_HUB_DISABLE_XET": "1"}
        print(_run(*own, "push", model, "someone/model", cwd=place, **environment).splitlines()[-1])


def _prove_model(python: Path, model: Path, output: Path) -> None:
    """Copies what `push` sends of a model to `output`, and loads it there with and without the package."""
    missing = [name for name in ("README.md", "LICENSE-CODE", "model.safetensors") if not (model / name).is_file()]
    if missing:
        raise SystemExit(f"{model} has no {', '.join(missing)}; write a card with `vanilla-transformer card`")
    output.mkdir(parents=True)
    upload = prepare(model, "user/name")
    for name, content in upload.files.items():
        (output / name).write_bytes(content if isinstance(content, bytes) else content.read_bytes())
    _run(str(python), "-P", *COMMAND, "translate", "--model", str(output), "a man rides a bicycle .")
    _run(str(python), "-m", "pip", "uninstall", "--quiet", "--yes", "hf-vanilla-transformer")
    with tempfile.TemporaryDirectory(prefix="hub-") as home:
        print(_run(str(python), "-P", "-c", WITHOUT_PACKAGE, str(output), cwd=Path(home), HF_HOME=home).strip())
    print(f"{model} is ready: vanilla-transformer push {model} USER/NAME")


def _run(*command: str, cwd: Path | None = None, **environment: str) -> str:
    """Runs a command and returns its output; a failure ends the program with it."""
    outside = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    settings: dict[str, Any] = {"cwd": cwd, "env": outside | environment, "capture_output": True, "text": True}
    result = subprocess.run(command, **settings, check=False)
    if result.returncode:
        raise SystemExit(f"{' '.join(command)} failed ({result.returncode}):\n{result.stdout}{result.stderr}")
    return str(result.stdout)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("dist"), help="folder for the files (default: %(default)s)")
    parser.add_argument("--model", type=Path, help="a saved model with its card, to be published")
    return parser.parse_args()


if __name__ == "__main__":
    main()
