"""Stock models with graphs in Chromium: transformers.js has our ids and translations, without a network."""

import json
import os
import shutil
import subprocess
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest

pytest.importorskip("selenium.webdriver")
pytest.importorskip("onnxruntime", reason="onnxruntime isn't installed")
from graphs import KINDS, PAIRS, Graphs, export
from test_transformers_js import ODD

from hf_vanilla_transformer import Translator
from tests.chromium import MARKS, chromium

pytestmark = MARKS
PACKAGE = "@huggingface/transformers@4.3.2"
CORPUS = [one["source"] for one in PAIRS] + ODD[1:]
TEXTS = [PAIRS[3]["source"], PAIRS[7]["source"]]
# It loads the files of onnxruntime-web that it would fetch from a content network, from here.
PROGRAM = """
const [place, dtypes, texts, corpus, done] = arguments;
(async () => {
  const { AutoTokenizer, env, pipeline } = await import("/@huggingface/transformers/dist/transformers.min.js");
  Object.assign(env, { allowRemoteModels: false, allowLocalModels: true, localModelPath: "/" });
  const { wasm } = env.backends.onnx;
  for (const [name, address] of Object.entries(wasm.wasmPaths))
    wasm.wasmPaths[name] = address.replace(/.*(?=[/]dist)/, "/onnxruntime-web");
  const tokenizer = await AutoTokenizer.from_pretrained(place);
  const ids = corpus.map((text) => tokenizer.encode(text));
  const found = { ids, decoded: ids.map((one) => tokenizer.decode(one, { skip_special_tokens: true })) };
  for (const dtype of dtypes) {
    const translate = await pipeline("translation", place, { dtype, device: "wasm" });
    for (const num_beams of [1, 4]) {
      const texts_ = found[`${dtype} ${num_beams}`] = [];
      for (const text of texts)
        texts_.push((await translate(text, { num_beams, max_new_tokens: 20 }))[0].translation_text);
    }
  }
  return found;
})().then(done, (error) => done(String(error)));
"""


class Quiet(SimpleHTTPRequestHandler):
    """Serves a folder, and says nothing."""

    def log_message(self, *arguments):
        pass


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder with npm's packages, and its address."""
    place = tmp_path_factory.mktemp("site")
    if shutil.which("npm") is None:
        pytest.skip("npm isn't installed, so transformers.js wasn't tried")
    command = ["npm", "install", "--no-audit", "--no-fund", PACKAGE]
    environment = os.environ | {"ONNXRUNTIME_NODE_INSTALL_CUDA": "skip"}  # it would fetch CUDA's libraries
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=place, env=environment)
    if done.returncode:
        pytest.skip(f"npm can't install transformers.js, so it wasn't tried: {done.stderr[-300:]}")
    root = place / "node_modules"
    (root / "index.html").write_text("<!doctype html><link rel=icon href=data:,>", encoding="utf-8")
    with ThreadingHTTPServer(("localhost", 0), partial(Quiet, directory=root)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield root, f"http://localhost:{server.server_port}/"
        server.shutdown()


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with chromium(tmp_path_factory.mktemp("chromium")) as driver:
        driver.set_script_timeout(300)
        yield driver


@pytest.mark.timeout(1_800)
@pytest.mark.parametrize("kind", KINDS)
def test_translations_are_those_of_translator(kind, site, browser, tmp_path):
    (root, address), made = site, export(kind, tmp_path, steps=300)
    model, tokenizer, folder = made.model, made.tokenizer, made.folder
    (root / kind).symlink_to(folder)
    browser.get(address)
    browser.get_log("performance")
    found = browser.execute_async_script(PROGRAM, kind, ["fp32", "q8"], TEXTS, CORPUS)
    ids = tokenizer(CORPUS)["input_ids"]
    assert found.pop("ids") == ids
    assert found.pop("decoded") == tokenizer.batch_decode(ids, skip_special_tokens=True)
    translator = Translator(model, "cpu", tokenizer=tokenizer)
    exact = translator(TEXTS, num_beams=1, unknown_target="drop")
    graphs, start = Graphs(folder / "onnx", "_quantized"), model.generation_config.decoder_start_token_id
    rough = [graphs.greedy(ids, start, 20) for ids in tokenizer(TEXTS)["input_ids"]]
    rough = tokenizer.batch_decode(rough, skip_special_tokens=True)
    # transformers.js 4.3.2 takes the best token of every step, whatever num_beams is.
    assert found == {"fp32 1": exact, "fp32 4": exact, "q8 1": rough, "q8 4": rough}
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = [one["params"]["request"]["url"] for one in events if one["method"] == "Network.requestWillBeSent"]
    assert all(one.startswith((address, "blob:", "data:", "chrome:")) for one in asked)
