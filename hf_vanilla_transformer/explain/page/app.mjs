// The page's state, and what is computed when it changes. Views read it and are drawn again.
import { Decoding, Record, UNTOUCHED } from "./model.mjs";
import { greedySearch, limitOf, search } from "./search.mjs";
import { largest, logSoftmax } from "./tensor.mjs";
import { misread } from "./tokenizer.mjs";

const MOST_TOKENS = 100;  // of a source

/** A text of the page in a language; values take the place of {names}. */
export function text({ texts }, language, key, values = {}) {
  return (texts[key]?.[language] ?? key).replace(/\{(\w+)\}/g, (_, name) => values[name]);
}

export class App {
  /** `draw` shows the state: all of it, the "top", or a section; `model` and `tokenizer` compute it. */
  constructor(data, model, tokenizer, draw) {
    Object.assign(this, { data, model, tokenizer, draw, timer: null, changed: null, plain: null, problem: null });
    this.width = data.config.d_model;
    this.misread = misread(tokenizer, data.tokenizer.samples);
    const part = (layers) => ({ layer: layers - 1, head: 0, query: 0 });
    this.state = {
      language: data.language, text: data.examples[0] ?? "", plan: { ...data.plan }, options: { ...UNTOUCHED },
      place: 0, encoder: part(1), decoder: part(1), cross: part(data.config.decoder_layers),
      step: null, reference: null, tour: null,
    };
    this.t = (key, values) => text(data, this.state.language, key, values);
  }

  /** Changes the state and draws it. */
  set(patch) {
    Object.assign(this.state, patch);
    this.draw();
  }

  stop() {
    clearInterval(this.timer);
    this.timer = null;
  }

  /** Reads and translates a sentence. */
  translate(sentence) {
    this.stop();
    const ids = sentence.trim() ? this.tokenizer.source.encode(sentence) : [];
    const { config } = this.data, isLearned = config.position_encoding === "learned";
    const most = isLearned ? Math.min(MOST_TOKENS, config.max_position_embeddings) : MOST_TOKENS;
    this.problem = null;
    if (this.misread !== undefined) this.problem = this.t("misread", { text: this.misread });
    else if (!ids.length) this.problem = this.t("empty");
    else if (ids.length > most) this.problem = this.t("tooLong", { number: ids.length, most });
    else {
      this.state.text = sentence;
      this.ids = ids;
      this.source = ids.map((id) => this.tokenizer.source.shown[id]);
      this.compute();
    }
    this.show();
  }

  /** Searches with other beams or another penalty. */
  search(patch) {
    this.stop();
    Object.assign(this.state.plan, patch);
    this.compute();
    this.show();
  }

  /** Switches a part of the computation off or on. */
  switch(patch) {
    this.stop();
    Object.assign(this.state.options, patch);
    this.computeChanged();
    this.show();
  }

  /** Draws the translations and logits at once, and then the sections that are open. */
  show() {
    this.draw("top");
    setTimeout(() => this.draw());
  }

  compute() {
    const { state } = this;
    this.plain = this.runOf(UNTOUCHED, null);
    this.target = this.plain.search.found[0].tokens;
    this.targets = this.target.map((id) => this.tokenizer.target.shown[id]);
    this.inputs = this.inputsOf(this.target).map((id) => this.tokenizer.target.shown[id]);
    state.place = Math.min(state.place, this.target.length - 1);
    state.encoder.query = Math.min(state.encoder.query, this.ids.length - 1);
    Object.assign(state, { step: null, reference: null });
    this.computeChanged();
  }

  computeChanged() {
    const { options } = this.state;
    const isChanged = Object.keys(UNTOUCHED).some((name) => options[name] !== UNTOUCHED[name]);
    const changed = this.changed = isChanged ? this.runOf({ ...options }, this.target) : null;
    this.state.step = null;
    if (!changed) return;
    // Without the mask every step computes all positions again: its logits are shown before its translation.
    if (options.causal) this.searchIn(changed);
    else setTimeout(() => this.changed === changed && (this.searchIn(changed), this.draw()));
  }

  /** What the views show: the run with the switches, or the one as trained. */
  get run() {
    return this.changed ?? this.plain;
  }

  /** Computes every number in between for a target; null: searches, and computes them for what is found. */
  runOf(options, target) {
    const { model, ids, state: { plan } } = this, encoder = new Record(), decoder = new Record();
    const memory = model.encode(ids, options, encoder), limit = limitOf(plan, model.config, ids.length);
    const run = { options, memory, limit, search: null, text: "…", encoder, decoder };
    if (!target) this.searchIn(run);
    const tokens = target ?? run.search.found[0].tokens;
    run.logits = model.logits(model.decode(this.inputsOf(tokens), memory, options, decoder), tokens.length);
    run.logs = run.logits.map((row, n) => logSoftmax(row)[tokens[n]]);
    return run;
  }

  searchIn(run) {
    run.search = search(new Decoding(this.model, run.memory, run.options), this.state.plan, run.limit);
    run.text = this.tokenizer.target.decode(run.search.found[0].tokens);
  }

  /** The target shifted right (3.1). */
  inputsOf(tokens) {
    return [this.state.plan.start, ...tokens.slice(0, -1)];
  }

  // ---- What views ask for ----
  sublayers(part) {
    return part === "encoder" ? this.run.encoder.layers : this.run.decoder.layers;
  }

  /** The tokens attended to, and those that attend. */
  sides(part) {
    if (part === "encoder") return [this.source, this.source];
    if (part === "cross") return [this.source, this.targets];
    return [this.inputs, this.inputs.map((token, n) => `${token} → ${this.targets[n]}`)];
  }

  query(part) {
    return part === "encoder" ? this.state.encoder.query : this.state.place;
  }

  /** Chooses the token that attends. */
  choose(part, place) {
    this.set(part === "encoder" ? { encoder: { ...this.state.encoder, query: place } } : { place });
  }

  /** Cross-attention of the last layer, the mean of its heads: a row for each target token. */
  overview() {
    const { weights } = this.run.decoder.layers.at(-1).cross;
    const mean = (n, key) => weights.reduce((sum, head) => sum + head[n][key], 0) / weights.length;
    return weights[0].map((row, n) => row.map((_, key) => mean(n, key)));
  }

  /** Teacher forcing: what is predicted at each position after the right tokens. */
  forced() {
    const { run, state } = this, isOwn = state.reference === null;
    const right = isOwn ? this.plain.text : state.reference;
    if (run.forced?.right === right) return run.forced;
    const targets = isOwn ? this.target : this.tokenizer.target.encode(right), inputs = this.inputsOf(targets);
    const rows = this.model.logits(this.model.decode(inputs, run.memory, run.options), inputs.length);
    run.forced = {
      right, targets, inputs, predicted: rows.map((row) => largest(row, 1)[0]),
      probabilities: rows.map((row, n) => Math.exp(logSoftmax(row)[targets[n]])),
    };
    return run.forced;
  }

  /** Free running: the tokens of greedy search. */
  free() {
    const { run, model, state } = this;
    run.free ??= greedySearch(new Decoding(model, run.memory, run.options), state.plan, run.limit).tokens;
    return run.free;
  }

  /** Leaves each source token out, one after the other, and computes the target's log-probabilities again. */
  async leaveOut() {
    const { run, model, ids, target } = this, left = [];
    if (run.isLeavingOut) return;
    run.isLeavingOut = true;
    for (let n = 0; n < ids.length - 1; n++) {
      await new Promise((resolve) => setTimeout(resolve));
      const memory = model.encode(ids.toSpliced(n, 1), run.options);
      const rows = model.logits(model.decode(this.inputsOf(target), memory, run.options), target.length);
      left.push(rows.map((row, place) => logSoftmax(row)[target[place]]));
    }
    run.left = left;
    if (run === this.run) this.draw("attribution");
  }
}
