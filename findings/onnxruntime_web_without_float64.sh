#!/usr/bin/env bash
# onnxruntime-web 1.31.0-dev.20260914-8d85527a0 (that of transformers.js 4.3.2): the build "asyncify", which
# transformers.js loads in all browsers but old Safaris, can't open a graph with a Cast to float64 ("Could not find an
# implementation for Cast(19)"). The plain build in the same package and onnxruntime-node 1.30.0 compute it, so that a
# graph that works in node doesn't open in a browser.
#
# Seen on 2026-11-28 (2 cores of an Intel Xeon, Python 3.11, node 20.20):
#     onnxruntime-node: 1 2
#     onnxruntime-web: 1 2
#     onnxruntime-web, asyncify: Can't create a session. ERROR_CODE: 9, ERROR_MESSAGE: Could not find an implementation
#     for Cast(19) node with name ''
# It needs node and npm, and takes a minute, mostly for the installation. Exit code 1: the behaviour has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet onnx==1.23.2
export ONNXRUNTIME_NODE_INSTALL_CUDA=skip
npm install --silent --no-audit --no-fund onnxruntime-node@1.30.0 onnxruntime-web@1.31.0-dev.20260914-8d85527a0
cat >write.py <<'PROGRAM'
from onnx import TensorProto, helper, save

x = helper.make_tensor_value_info("x", TensorProto.INT64, [2])
y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [2])
nodes = [
    helper.make_node("Cast", ["x"], ["d"], to=TensorProto.DOUBLE),
    helper.make_node("Cast", ["d"], ["y"], to=TensorProto.FLOAT),
]
graph = helper.make_graph(nodes, "casts", [x], [y])
save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=10), "casts.onnx")
PROGRAM
venv/bin/python write.py
cat >read.mjs <<'PROGRAM'
import { readFileSync } from "node:fs";

const [title, build] = process.argv.slice(2);
const ort = await import(title.split(",")[0]), { InferenceSession, Tensor } = ort.InferenceSession ? ort : ort.default;
if (build !== undefined) {
  const place = new URL(`node_modules/onnxruntime-web/dist/ort-wasm-simd-threaded${build}`, import.meta.url).href;
  ort.env.wasm.wasmPaths = { mjs: `${place}.mjs`, wasm: `${place}.wasm` };
  ort.env.wasm.numThreads = 1;
}
let said;
try {
  const session = await InferenceSession.create(readFileSync("casts.onnx"));
  said = [...(await session.run({ x: new Tensor("int64", [1n, 2n], [2]) })).y.data].join(" ");
} catch (error) {
  said = error.message;
}
console.log(`${title}: ${said}`);
const isSo = build === ".asyncify" ? said.includes("Could not find an implementation for Cast(19)") : said === "1 2";
process.exit(isSo ? 0 : 1);
PROGRAM
node read.mjs onnxruntime-node
node read.mjs onnxruntime-web ""
node read.mjs "onnxruntime-web, asyncify" .asyncify
