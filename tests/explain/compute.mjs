// Runs the page's own modules without a browser: node compute.mjs CONTENTS < cases.json > results.json
import { readFileSync, writeFileSync } from "node:fs";

const folder = new URL("../../hf_vanilla_transformer/explain/page/", import.meta.url);
const load = (name) => import(new URL(`${name}.mjs`, folder));
const { modelOf } = await load("checkpoint");
const { UNTOUCHED, Decoding } = await load("model");
const { limitOf, search } = await load("search");
const { misread, tokenizersOf } = await load("tokenizer");

const data = JSON.parse(readFileSync(process.argv[2], "utf-8"));
const model = modelOf(data), { source, target: written } = tokenizersOf(data.tokenizer);

function computed({ text, target, options = {}, plan = {} }) {
  const ids = source.encode(text), targets = written.encode(text);
  const result = { ids, targets, readable: ids.map((id) => source.shown[id]), decoded: written.decode(targets) };
  const chosen = { ...UNTOUCHED, ...options };
  if (target) {
    const hidden = model.decode(target, model.encode(ids, chosen), chosen);
    result.logits = model.logits(hidden, target.length).map((row) => Array.from(row));
  }
  for (const beams of plan.beams ?? []) {
    const how = { ...data.plan, ...plan, num_beams: beams }, memory = model.encode(ids, chosen);
    const { found } = search(new Decoding(model, memory, chosen), how, limitOf(how, data.config, ids.length));
    result[`beams${beams}`] = found.map(({ tokens, score }) => ({ tokens, score, text: written.decode(tokens) }));
  }
  return result;
}

const wrong = misread({ source, target: written }, data.tokenizer.samples);
if (wrong !== undefined) throw new Error(`read otherwise than in Python: ${wrong}`);
const cases = JSON.parse(readFileSync(0, "utf-8"));
writeFileSync(1, JSON.stringify(cases.map(computed)));
