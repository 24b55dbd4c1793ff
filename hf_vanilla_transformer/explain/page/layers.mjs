// Sections 3.1 to 3.3, opened: equation 1 step by step, the residual connection and LayerNorm, and the feed-forward
// network.
import { choice, controls, el, fixed, headings, matrix, numbered, percent, scrolling, strip } from "./dom.mjs";
import { links, token } from "./links.mjs";
import { dot, moments } from "./tensor.mjs";

/** A part's choice of layer and head, its picture, equation 1 and the sub-layers; `part`: encoder, decoder or cross. */
export function attentionPart(app, part) {
  const { t, state } = app, { layer, head } = state[part], layers = app.sublayers(part), kept = layers[layer];
  const attention = part === "cross" ? kept.cross : kept.self, { off } = state.options;
  const place = app.query(part), [keys, queries] = app.sides(part);
  const formula = state.options.scaled ? "q·k / √dₖ" : "q·k";
  const isOff = off && off.part === part && off.layer === layer && off.head === head;
  return [
    choices(app, part, layers.length, attention.weights.length),
    thumbnails(app, part, attention.weights),
    part === "cross" ? crossLines(app, attention.weights[head]) : null,
    el("h4", {}, t("equation1", { token: queries[place] })),
    el("p", { class: "formula" },
      `softmax(${formula}) v,  dₖ = ${attention.dk},  √dₖ = ${fixed(Math.sqrt(attention.dk))}`),
    isOff ? el("p", { class: "warning" }, t("headOff")) : null,
    equationOne(app, attention, head, place, keys),
    ...around(app, attention, place, "Attention(x)"),
    ...(part === "decoder" ? [] : feedForward(app, kept.feed, place)),
  ];
}

function choose(app, part, patch) {
  app.set({ [part]: { ...app.state[part], ...patch } });
}

function choices(app, part, layers, heads) {
  const { t, state } = app, { layer, head } = state[part], [, queries] = app.sides(part);
  const set = (name) => (value) => choose(app, part, { [name]: Number(value) });
  return controls(
    choice(`${part}-layer`, t("layer"), numbered(layers), layer, set("layer")),
    choice(`${part}-head`, t("head"), numbered(heads), head, set("head")),
    choice(`${part}-query`, t("query"), queries.map((query, n) => [n, `${n + 1} ${query}`]), app.query(part),
      (n) => app.choose(part, Number(n))));
}

function thumbnails(app, part, weights) {
  const { t, state } = app, columns = app.sides(part)[0].length;
  return el("div", { class: "thumbnails" }, ...weights.map((rows, n) => {
    const isChosen = String(n === state[part].head);
    const picture = matrix(rows, columns, t("matrixOf", { head: n + 1 }), app.query(part));
    const properties = { type: "button", class: "thumbnail", id: `${part}-head-${n}`, "aria-pressed": isChosen };
    const onclick = () => choose(app, part, { head: n });
    return el("button", { ...properties, onclick }, picture, el("span", {}, t("headNumber", { head: n + 1 })));
  }));
}

function crossLines(app, weights) {
  const { t } = app;
  return links({
    id: "cross-lines", keys: app.source, queries: app.targets, weights, chosen: app.state.place,
    onChoose: (n) => app.choose("cross", n), titles: [t("source"), t("target")],
    says: (from, to) => t("attendsTo", { from, to }), label: t("linesLabel"),
  });
}

/** A row for each key: its vector, the product with the query, the softmax's weight, and its value. */
function equationOne(app, attention, head, place, keys) {
  const { t } = app, { dk, dv, scale, queries, weights } = attention, visible = attention.visible(place);
  const query = queries[place].subarray(head * dk, (head + 1) * dk), row = weights[head][place];
  const result = new Float32Array(dv);
  const lines = visible.keys.map((key, n) => {
    const product = dot(query, 0, key, head * dk, dk), isMasked = n >= row.length;
    const value = visible.values[n].subarray(head * dv, (head + 1) * dv);
    if (!isMasked) value.forEach((one, c) => (result[c] += one * row[n]));
    return el("tr", { class: isMasked ? "masked" : null },
      el("th", { scope: "row" }, token(keys[n])),
      el("td", { class: "wide" }, strip(key.subarray(head * dk, (head + 1) * dk), t("keyOf", { token: keys[n] }))),
      el("td", {}, fixed(product)),
      el("td", {}, isMasked ? t("masked") : fixed(product * scale)),
      isMasked ? barCell(0, "0") : barCell(row[n], percent(row[n])),
      el("td", { class: "wide" }, strip(value, t("valueOf", { token: keys[n] }))));
  });
  const names = [t("key"), "k", "q·k", scale === 1 ? t("undivided") : "÷ √dₖ", "softmax", "v"];
  return scrolling(t("equation1", { token: keys[place] }),
    vector(t("queryVector"), query),
    el("table", { class: "equation" }, headings(...names), el("tbody", {}, ...lines)),
    vector(t("average"), result));
}

/** A bar with its number, as a cell of a table. */
export function barCell(share, number, kind = "bar") {
  const filled = el("span", { style: { width: `${100 * share}%` } });
  const track = el("span", { class: "track", "aria-hidden": "true" }, filled);
  return el("td", { class: kind }, track, el("span", { class: "number" }, number));
}

/** The residual connection and LayerNorm around a sub-layer, for one position. */
function around(app, kept, place, name) {
  const { t } = app, of = (values) => values.subarray(place * app.width, (place + 1) * app.width);
  const rows = [
    ["x", of(kept.before)],
    [kept.isPre ? t("updateOfNormed", { name }) : name, of(kept.update)],
    [t(app.state.options.residual ? "sum" : "noSum", { name }), of(kept.sum)],
  ];
  if (!kept.isPre) rows.push(["LayerNorm", of(kept.result)]);
  return [el("h4", {}, t("residualOf", { name })), vectors(app, rows)];
}

function vector(name, values, note = null, scale = null) {
  const label = el("span", {}, name, note && el("small", {}, note));
  return el("div", { class: "vector" }, label, strip(values, note ? `${name}: ${note}` : name, scale));
}

/** Vectors one above the other on one scale, with their mean and standard deviation if there are few. */
export function vectors(app, rows, isBrief = false) {
  const most = Math.max(1e-9, ...rows.map(([, values]) => Math.max(...values.map(Math.abs))));
  return el("div", { class: isBrief ? "brief" : "vectors" }, ...rows.map(([name, values]) => {
    const { mean, deviation } = moments(values);
    const note = app.t("moments", { mean: fixed(mean), deviation: fixed(deviation) });
    return vector(name, values, isBrief ? null : note, most);
  }));
}

function feedForward(app, kept, place) {
  const { t } = app, width = (kept.inner.length / kept.before.length) * app.width;
  const inner = kept.inner.subarray(place * width, (place + 1) * width);
  const active = inner.filter((value) => value > 0).length;
  return [
    el("h4", {}, t("feedForward")),
    el("p", {}, t("feedForwardText", { active, width, d: app.width })),
    vector(t("inner"), inner),
    ...around(app, kept, place, "FFN(x)"),
  ];
}
