// Sections 3.1 to 3.3, opened: equation 1 step by step, the residual connection and LayerNorm, the feed-forward network.
import { choice, el, fixed, matrix, numbered, percent, strip } from "./dom.mjs";
import { links, token } from "./links.mjs";
import { dot, moments } from "./tensor.mjs";

/** A part's choice of layer and head, its picture, equation 1 and the sub-layers; `part`: encoder, decoder or cross. */
export function attentionPart(app, part) {
  const { t, state } = app, { layer, head } = state[part], kept = app.sublayers(part)[layer];
  const attention = kept[part === "cross" ? "cross" : "self"], [keys, queries] = app.sides(part), place = app.query(part);
  const set = (patch) => app.set({ [part]: { ...state[part], ...patch } });
  const choices = el("form", { class: "choices", onsubmit: (event) => event.preventDefault() },
    choice(`${part}-layer`, t("layer"), numbered(app.sublayers(part).length, ""), layer, (value) => set({ layer: Number(value) })),
    choice(`${part}-head`, t("head"), numbered(attention.weights.length, ""), head, (value) => set({ head: Number(value) })),
    choice(`${part}-query`, t("query"), queries.map((text, n) => [n, `${n + 1} ${text}`]), place, (n) => app.choose(part, Number(n))));
  const heads = attention.weights.map((rows, n) => el("button", {
    type: "button", class: "thumbnail", id: `${part}-head-${n}`, "aria-pressed": String(n === head), onclick: () => set({ head: n }),
  }, matrix(rows, keys.length, t("matrixOf", { head: n + 1 }), place), el("span", {}, t("headNumber", { head: n + 1 }))));
  const isOff = ["part", "layer", "head"].every((name) => state.options.off?.[name] === { part, layer, head }[name]);
  return [
    choices,
    el("div", { class: "thumbnails" }, ...heads),
    part === "cross" ? crossLines(app, attention.weights[head]) : null,
    el("h4", {}, t("equation1", { token: queries[place] })),
    el("p", { class: "formula" }, `softmax(q·k${state.options.scaled ? " / √dₖ" : ""}) v,  dₖ = ${attention.dk},  √dₖ = ${fixed(Math.sqrt(attention.dk))}`),
    isOff ? el("p", { class: "warning" }, t("headOff")) : null,
    equationOne(app, attention, head, place, keys),
    ...around(app, kept[part === "cross" ? "cross" : "self"], place, t("sublayerAttention")),
    ...(part === "decoder" ? [] : feedForward(app, kept.feed, place)),
  ];
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
  const query = queries[place].subarray(head * dk, (head + 1) * dk), row = weights[head][place], result = new Float32Array(dv);
  const lines = visible.keys.map((key, n) => {
    const product = dot(query, 0, key, head * dk, dk), isMasked = n >= row.length, value = visible.values[n].subarray(head * dv, (head + 1) * dv);
    if (!isMasked) value.forEach((one, c) => (result[c] += one * row[n]));
    return el("tr", { class: isMasked ? "masked" : null },
      el("th", { scope: "row" }, token(keys[n])),
      el("td", { class: "wide" }, strip(key.subarray(head * dk, (head + 1) * dk), t("keyOf", { token: keys[n] }))),
      el("td", {}, fixed(product)), el("td", {}, isMasked ? t("masked") : fixed(product * scale)),
      isMasked ? barCell(0, "0") : barCell(row[n], percent(row[n])),
      el("td", { class: "wide" }, strip(value, t("valueOf", { token: keys[n] }))));
  });
  const heading = (text, isWide = false) => el("th", { scope: "col", class: isWide ? "wide" : null }, text);
  return el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": t("equation1", { token: "" }) },
    el("div", { class: "vector" }, el("span", {}, t("queryVector")), strip(query, t("queryVector"))),
    el("table", {}, el("thead", {}, el("tr", {}, heading(t("key")), heading("k", true), heading("q·k"),
      heading(scale === 1 ? t("undivided") : "÷ √dₖ"), heading("softmax"), heading("v", true))), el("tbody", {}, ...lines)),
    el("div", { class: "vector" }, el("span", {}, t("average")), strip(result, t("average"))));
}

/** A bar with its number, as a cell of a table. */
export function barCell(share, number, kind = "bar") {
  const width = `${100 * share}%`, track = el("span", { class: "track", "aria-hidden": "true" }, el("span", { style: { width } }));
  return el("td", { class: kind }, track, el("span", { class: "number" }, number));
}

/** The residual connection and LayerNorm around a sub-layer, for one position. */
function around(app, kept, place, name) {
  const { t } = app, of = (values) => values.subarray(place * app.width, (place + 1) * app.width);
  const isResidual = app.state.options.residual;
  const rows = kept.isPre
    ? [["x", kept.before], [t("updateOfNormed", { name }), kept.update], [isResidual ? t("sum", { name }) : t("noSum", { name }), kept.sum]]
    : [["x", kept.before], [name, kept.update], [isResidual ? t("sum", { name }) : t("noSum", { name }), kept.sum], ["LayerNorm", kept.result]];
  return [el("h4", {}, t("residualOf", { name })), vectors(app, rows.map(([text, values]) => [text, of(values)]))];
}

/** Vectors one above the other on one scale, with their mean and standard deviation if there are few. */
export function vectors(app, rows, isBrief = false) {
  const most = Math.max(1e-9, ...rows.map(([, values]) => Math.max(...values.map(Math.abs))));
  return el("div", { class: isBrief ? "brief" : "vectors" }, ...rows.map(([text, values]) => {
    const { mean, deviation } = moments(values), numbers = app.t("moments", { mean: fixed(mean), deviation: fixed(deviation) });
    return el("div", { class: "vector" }, el("span", {}, text, isBrief ? null : el("small", {}, numbers)), strip(values, `${text}: ${numbers}`, most));
  }));
}

function feedForward(app, kept, place) {
  const { t } = app, width = kept.inner.length / (kept.before.length / app.width), inner = kept.inner.subarray(place * width, (place + 1) * width);
  const active = inner.filter((value) => value > 0).length;
  return [
    el("h4", {}, t("feedForward")), el("p", {}, t("feedForwardText", { active, width, d: app.width })),
    el("div", { class: "vector" }, el("span", {}, t("inner")), strip(inner, t("inner"))),
    ...around(app, kept, place, "FFN(x)"),
  ];
}
