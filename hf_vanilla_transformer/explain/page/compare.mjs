// The lists of tokens and vectors; and what is beside something else: the softmax's best ten, teacher forcing and free
// running, attention and attribution.
import { el, fixed, headings, percent, scrolling } from "./dom.mjs";
import { barCell, vectors } from "./layers.mjs";
import { token } from "./links.mjs";
import { largest, logSoftmax } from "./tensor.mjs";

const SHOWN = 10;

/** Section 5.1: the tokens of the source with their numbers. */
export function tokens(app) {
  const items = app.source.map((piece, n) => el("li", {}, token(piece), el("small", {}, app.ids[n])));
  return [el("ol", { class: "pieces" }, ...items)];
}

/** Sections 3.4 and 3.5: embedding, position and their sum, of the chosen source token; and all positions. */
export function embeddings(app) {
  const { t, state, run } = app, kept = run.encoder.embedded, { query } = state.encoder, one = kept[query];
  const buttons = app.source.map((piece, n) => token(piece, "button", {
    type: "button", id: `embedded-${n}`, class: "token", "aria-pressed": String(n === query),
    onclick: () => app.choose("encoder", n),
  }));
  const rows = [
    [t("embeddingOf", { token: app.source[query] }), one.embedding],
    [t("positionOf", { position: query }), one.place],
    [t("total"), one.sum],
  ];
  return [
    el("div", { class: "tokens" }, ...buttons),
    vectors(app, rows),
    el("h4", {}, t("allPositions")),
    vectors(app, kept.map(({ place }, n) => [`${n}`, place]), true),
  ];
}

/** Section 3.4: the most probable tokens at the chosen position, of each run. */
export function bestTen(app) {
  const { t, state: { place }, plain, changed, tokenizer } = app;
  const list = (run, title) => {
    const logits = run.logits[place], logs = logSoftmax(logits), rows = largest(logits, SHOWN).map((id) => el("tr", {},
      el("th", { scope: "row" }, token(tokenizer.target.shown[id])),
      barCell(Math.exp(logs[id]), percent(Math.exp(logs[id]))), el("td", {}, fixed(logits[id]))));
    const head = headings(t("nextToken"), t("probability"), t("logit"));
    const table = el("table", {}, head, el("tbody", {}, ...rows));
    return el("div", { class: "best" }, changed && el("h4", {}, title), table);
  };
  if (!changed) return [list(plain)];
  const differences = plain.logits[place].map((value, n) => Math.abs(value - changed.logits[place][n]));
  return [
    el("div", { class: "pair" }, list(plain, t("asTrained")), list(changed, t("switched"))),
    el("p", {}, t("difference", { number: fixed(Math.max(...differences)) })),
  ];
}

/** Section 3.1, "shifted right": the decoder fed with the right tokens, and with its own. */
export function forcing(app) {
  const { t, tokenizer } = app, forced = app.forced(), free = app.free(), { targets, inputs, predicted } = forced;
  const onchange = () => app.set({ reference: input.value });
  const input = el("input", { id: "reference", type: "text", value: forced.right, dir: "auto", onchange });
  const shown = (id) => (id === undefined ? "" : token(tokenizer.target.shown[id]));
  const cell = (id, right) => el("td", { class: id === undefined || id === right ? null : "differs" }, shown(id));
  const rows = Array.from({ length: Math.max(targets.length, free.length) }, (_, n) => el("tr", {},
    el("td", {}, shown(inputs[n])), cell(predicted[n], targets[n]),
    el("td", {}, n < targets.length ? percent(forced.probabilities[n]) : ""), cell(free[n], targets[n])));
  const wrong = targets.filter((id, n) => id !== predicted[n]).length;
  const drifted = targets.filter((id, n) => id !== free[n]).length + Math.max(0, free.length - targets.length);
  const groups = el("tr", {}, el("th", { colspan: 3, scope: "colgroup" }, t("teacherForcing")),
    el("th", { scope: "col" }, t("freeRunning")));
  const head = headings(t("reads"), t("predicts"), t("ofRight"), t("predicts"));
  head.prepend(groups);
  return [
    el("label", { class: "block" }, t("reference"), " ", input),
    el("p", { role: "status" }, t("forcingSays", { wrong, drifted, count: targets.length })),
    scrolling(t("forcing"), el("table", { id: "forcing-table" }, head, el("tbody", {}, ...rows))),
  ];
}

/** Attention to each source token beside the loss of log-probability if the token is left out. */
export function attribution(app) {
  const { t, state: { place }, run, source } = app;
  if (!run.left) {
    app.leaveOut();
    return [el("p", { role: "status" }, t("computing"))];
  }
  const attention = app.overview()[place], drops = run.left.map((logs) => run.logs[place] - logs[place]);
  const most = Math.max(0.01, ...drops.map(Math.abs));
  const rows = drops.map((drop, n) => el("tr", {},
    el("th", { scope: "row" }, token(source[n])), barCell(attention[n], percent(attention[n])),
    barCell(Math.abs(drop) / most, fixed(drop), drop < 0 ? "bar negative" : "bar")));
  const [attended] = largest(attention.slice(0, drops.length), 1), [needed] = largest(drops, 1);
  const values = { target: app.targets[place], attended: source[attended], needed: source[needed] };
  return [
    el("p", { role: "status" }, t(attended === needed ? "attributionAgrees" : "attributionDiffers", values)),
    el("table", { id: "attribution-table" }, headings(t("source"), t("attentionShare"), t("drop")),
      el("tbody", {}, ...rows)),
  ];
}
