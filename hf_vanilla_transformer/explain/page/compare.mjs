// What is beside something else: the softmax's best ten, teacher forcing and free running, attention and attribution.
import { el, fixed, percent } from "./dom.mjs";
import { barCell, vectors } from "./layers.mjs";
import { token } from "./links.mjs";
import { largest, logSoftmax } from "./tensor.mjs";

const SHOWN = 10;

/** Section 3.4: the most probable tokens at the chosen position, of each run. */
export function bestTen(app) {
  const { t, state, plain, changed } = app;
  const list = (run, title) => {
    const logits = run.logits[state.place], logs = logSoftmax(logits);
    return el("div", { class: "best" }, changed ? el("h4", {}, title) : null, el("table", {},
      el("thead", {}, el("tr", {}, ...[t("nextToken"), t("probability"), t("logit")].map((one) => el("th", { scope: "col" }, one)))),
      el("tbody", {}, ...largest(logits, SHOWN).map((id) => el("tr", {},
        el("th", { scope: "row" }, token(app.tokenizer.shown[id])), barCell(Math.exp(logs[id]), percent(Math.exp(logs[id]))),
        el("td", {}, fixed(logits[id])))))));
  };
  const far = changed && Math.max(...plain.logits[state.place].map((value, n) => Math.abs(value - changed.logits[state.place][n])));
  return [
    el("div", { class: "pair" }, list(plain, t("asTrained")), changed ? list(changed, t("switched")) : null),
    changed ? el("p", { id: "difference" }, t("difference", { number: fixed(far) })) : null,
  ];
}

/** Section 3.1, "shifted right": the decoder fed with the right tokens, and with its own. */
export function forcing(app) {
  const { t, run } = app, forced = app.forced(), free = app.free();
  const input = el("input", { id: "reference", type: "text", value: forced.text, dir: "auto", onchange: () => app.set({ reference: input.value }) });
  const cell = (id, other) => el("td", { class: id === undefined || id === other ? null : "differs" }, id === undefined ? "" : token(app.tokenizer.shown[id]));
  const rows = Array.from({ length: Math.max(forced.targets.length, free.length) }, (_, n) => el("tr", {},
    el("td", {}, n in forced.inputs ? token(app.tokenizer.shown[forced.inputs[n]]) : ""), cell(forced.predicted[n], forced.targets[n]),
    el("td", {}, n in forced.targets ? percent(forced.probabilities[n]) : ""),
    cell(free[n], forced.targets[n])));
  const wrong = forced.predicted.filter((id, n) => id !== forced.targets[n]).length;
  const drifted = free.filter((id, n) => id !== forced.targets[n]).length + Math.max(0, forced.targets.length - free.length);
  return [
    el("label", { class: "block" }, t("reference"), " ", input),
    el("p", { role: "status" }, t("forcingSays", { wrong, drifted, count: forced.targets.length })),
    el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": t("forcing") }, el("table", { id: "forcing-table" },
      el("thead", {},
        el("tr", {}, el("th", { colspan: 3, scope: "colgroup" }, t("teacherForcing")), el("th", { scope: "col" }, t("freeRunning"))),
        el("tr", {}, ...["reads", "predicts", "ofRight", "predicts"].map((key) => el("th", { scope: "col" }, t(key))))),
      el("tbody", {}, ...rows))),
  ];
}

/** Attention to each source token beside the loss of log-probability if the token is left out. */
export function attribution(app) {
  const { t, state, run } = app, attention = app.overview()[state.place], drops = run.left?.map((logs) => run.logs[state.place] - logs[state.place]);
  if (!drops) {
    app.leaveOut();
    return [el("p", { role: "status" }, t("computing"))];
  }
  const most = Math.max(0.01, ...drops.map(Math.abs)), attended = largest(attention.slice(0, drops.length), 1)[0], needed = largest(drops, 1)[0];
  const rows = drops.map((drop, n) => el("tr", {},
    el("th", { scope: "row" }, token(app.source[n])), barCell(attention[n], percent(attention[n])),
    barCell(Math.abs(drop) / most, fixed(drop), drop < 0 ? "bar negative" : "bar")));
  return [
    el("p", { role: "status" }, t(attended === needed ? "attributionAgrees" : "attributionDiffers",
      { target: app.targets[state.place], attended: app.source[attended], needed: app.source[needed] })),
    el("table", { id: "attribution-table" }, el("thead", {}, el("tr", {}, ...[t("source"), t("attentionShare"), t("drop")].map(
      (one) => el("th", { scope: "col" }, one)))), el("tbody", {}, ...rows)),
  ];
}

/** Section 5.1: the tokens of the source with their numbers. */
export function tokens(app) {
  return [el("ol", { class: "pieces" }, ...app.source.map((text, n) => el("li", {}, token(text), el("small", {}, app.ids[n]))))];
}

/** Sections 3.4 and 3.5: embedding, position and their sum, of the chosen source token; and all positions. */
export function embeddings(app) {
  const { t, state, run } = app, kept = run.encoder.embedded, one = kept[state.encoder.query];
  const buttons = app.source.map((text, n) => token(text, "button", {
    type: "button", id: `embedded-${n}`, class: "token", "aria-pressed": String(n === state.encoder.query), onclick: () => app.choose("encoder", n),
  }));
  return [
    el("div", { class: "tokens" }, ...buttons),
    vectors(app, [[t("embeddingOf", { token: app.source[state.encoder.query] }), one.embedding],
      [t("positionOf", { position: state.encoder.query }), one.place], [t("total"), one.sum]]),
    el("h4", {}, t("allPositions")),
    vectors(app, kept.map(({ place }, n) => [`${n}`, place]), true),
  ];
}
