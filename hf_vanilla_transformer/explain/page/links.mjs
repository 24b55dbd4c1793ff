// Figures 3 to 5 of the paper: lines from what attends, on the right, to what is attended to, on the left.
import { el, percent, svg } from "./dom.mjs";
import { largest } from "./tensor.mjs";

const ROW = 30;  // pixels; as in the styles
const LEAST = 0.005;  // a weight that is shown

/**
 * Draws keys, queries, and the weights between them, rows of a list for each query. `chosen` is the query whose weights
 * are shown as numbers; `onChoose` is told another.
 */
export function links({ id, keys, queries, weights, chosen, onChoose, titles, says, label }) {
  const height = ROW * Math.max(keys.length, queries.length), middle = (n) => ROW * (n + 0.5);
  const row = weights[chosen] ?? [], line = (query, key, weight, kind) => svg("line", {
    x1: 0, y1: middle(key), x2: 100, y2: middle(query), class: kind,
    "stroke-opacity": weight, "vector-effect": "non-scaling-stroke",
  });
  const faint = [], strong = [];
  weights.forEach((one, query) => one.forEach((weight, key) => {
    if (query === chosen && weight >= 0.01) strong.push(line(query, key, Math.max(0.15, weight), "strong"));
    else if (query !== chosen && weight >= 0.05) faint.push(line(query, key, 0.35 * weight, "faint"));
  }));
  const picture = svg("svg", {
    viewBox: `0 0 100 ${height}`, height, preserveAspectRatio: "none", role: "img", "aria-label": label,
  }, ...faint, ...strong);
  const left = keys.map((key, n) => el("li", { class: "key" },
    el("small", {}, row[n] >= LEAST ? percent(row[n]) : ""),
    token(key, "span", { class: "token", style: { "--weight": row[n] ?? 0 } })));
  const right = queries.map((query, n) => el("li", {}, token(query, "button", {
    type: "button", id: `${id}-${n}`, class: "token", "aria-pressed": String(n === chosen), onclick: () => onChoose(n),
    onkeydown: (event) => onArrow(event, id, n, queries.length, onChoose),
  })));
  const best = largest(row, 3).filter((n) => row[n] >= LEAST);
  const named = best.map((n) => `${keys[n]} (${percent(row[n])})`).join(", ");
  return el("figure", { class: "links" },
    el("div", { class: "columns" },
      el("div", {}, el("h4", {}, titles[0]), el("ol", {}, ...left)),
      el("div", { class: "lines" }, picture),
      el("div", {}, el("h4", {}, titles[1]), el("ol", { class: "queries" }, ...right))),
    el("figcaption", { role: "status" }, says(queries[chosen], named)));
}

/** A token as text, in its own direction. */
export function token(text, name = "span", properties = { class: "token" }) {
  return el(name, { dir: "auto", ...properties }, text);
}

function onArrow(event, id, place, count, onChoose) {
  const next = place + ({ ArrowDown: 1, ArrowUp: -1 }[event.key] ?? 0);
  if (next === place || next < 0 || next >= count) return;
  event.preventDefault();
  onChoose(next);
  document.getElementById(`${id}-${next}`)?.focus();
}
