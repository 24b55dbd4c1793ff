// Section 6.1: beam search as a tree, a column for each step; and the hypotheses that have finished.
import { choice, el, fixed, svg } from "./dom.mjs";
import { divisor, path } from "./search.mjs";

const WIDTH = 112, HEIGHT = 30, MARGIN = 6;
const LETTERS = 13;  // of a token
const PACE = 700;  // milliseconds per step

/** The tree of the shown run up to the step that is chosen, with what plays it. */
export function beamTree(app) {
  const { t, state, run } = app, { steps } = run.search, shown = Math.min(state.step ?? steps.length, steps.length);
  const controls = el("form", { class: "choices", onsubmit: (event) => event.preventDefault() },
    choice("beams", t("beams"), Array.from({ length: 8 }, (_, n) => [n + 1, n ? n + 1 : t("greedy")]), state.plan.num_beams,
      (value) => app.search({ num_beams: Number(value) })),
    slider("alpha", `${t("penalty")} α = ${fixed(state.plan.length_penalty, 1)}`, 0, 2, 0.1, state.plan.length_penalty,
      (value) => app.search({ length_penalty: value })));
  if (!steps.length) return [controls, el("p", {}, t("greedyText"))];
  const steppers = el("form", { class: "choices", onsubmit: (event) => event.preventDefault() },
    slider("step", t("step", { step: shown, steps: steps.length }), 1, steps.length, 1, shown, (value) => app.set({ step: value })),
    el("button", { type: "button", id: "play", onclick: () => play(app, steps.length) }, t(app.timer ? "pause" : "play")));
  return [
    controls, steppers,
    el("div", { class: "scroll tree", tabindex: 0, role: "region", "aria-label": t("treeLabel") }, picture(app, steps.slice(0, shown), shown === steps.length)),
    el("p", { class: "legend" }, ...["kept", "finished", "dropped"].map((name) => el("span", { class: name }, t(name)))),
    hypotheses(app, steps[shown - 1]),
  ];
}

function slider(id, text, min, max, step, value, onInput) {
  const input = el("input", { id, type: "range", min, max, step, value, oninput: () => onInput(Number(input.value)) });
  return el("label", {}, text, " ", input);
}

function play(app, count) {
  if (app.timer) return app.stop();
  let step = (app.state.step ?? count) >= count ? 0 : app.state.step;
  const next = () => {
    step += 1;
    if (step >= count) app.stop();
    app.set({ step });
  };
  app.timer = setInterval(next, PACE);
  next();
}

function picture(app, steps, isComplete) {
  const places = new Map(), rows = Math.max(...steps.map(({ nodes }) => nodes.length)), edges = [], boxes = [];
  const best = new Set();
  for (let one = isComplete ? app.run.search.found[0]?.node : null; one; one = one.parent) best.add(one);
  const draw = (node, column, row, text, kind) => {
    const x = MARGIN + column * WIDTH, y = MARGIN + row * HEIGHT;
    places.set(node, [x, y]);
    boxes.push(svg("g", { class: `node ${kind}${best.has(node) ? " best" : ""}` },
      svg("rect", { x, y, width: WIDTH - 24, height: HEIGHT - 6, rx: 4 }),
      svg("title", {}, text), svg("text", { x: x + 5, y: y + 11 }, shortened(text)), svg("text", { x: x + 5, y: y + 21, class: "score" }, fixed(node.total))));
  };
  draw(steps[0].nodes[0].parent, 0, 0, app.tokenizer.shown[app.state.plan.start], "kept");
  steps.forEach(({ nodes }, column) => nodes.forEach((node, row) => {
    draw(node, column + 1, row, app.tokenizer.shown[node.token], node.state);
    const [[x, y], [x0, y0]] = [places.get(node), places.get(node.parent)], half = (HEIGHT - 6) / 2;
    edges.push(svg("path", {
      class: `edge ${node.state}${best.has(node) ? " best" : ""}`,
      d: `M${x0 + WIDTH - 24},${y0 + half} C${x - 12},${y0 + half} ${x0 + WIDTH - 12},${y + half} ${x},${y + half}`,
    }));
  }));
  const width = 2 * MARGIN + (steps.length + 1) * WIDTH - 24, height = 2 * MARGIN + rows * HEIGHT;
  return svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": app.t("treeLabel") }, ...edges, ...boxes);
}

function shortened(text) {
  const letters = [...text];
  return letters.length > LETTERS ? `${letters.slice(0, LETTERS - 1).join("")}…` : text;
}

/** The finished hypotheses after a step; the first is the translation at the end. */
function hypotheses(app, { finished }) {
  const { t, state } = app, formula = state.plan.is_gnmt ? "((5 + n) / 6)^α" : "n^α";
  if (!finished.length) return el("p", {}, t("noneFinished"));
  const rows = finished.map(({ node, length, score }) => el("tr", {},
    el("th", { scope: "row", dir: "auto" }, app.tokenizer.decode(path(node)) || "—"), el("td", {}, fixed(node.total)), el("td", {}, length),
    el("td", {}, fixed(divisor(state.plan, length))), el("td", {}, fixed(score, 3))));
  return el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": t("finishedTitle") }, el("table", {},
    el("caption", {}, t("finishedTitle")),
    el("thead", {}, el("tr", {}, ...[t("hypothesis"), "log P", t("length"), formula, t("score")].map((one) => el("th", { scope: "col" }, one)))),
    el("tbody", {}, ...rows)));
}
