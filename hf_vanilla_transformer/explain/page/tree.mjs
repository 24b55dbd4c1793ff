// Section 6.1: beam search as a tree, a column for each step; and the hypotheses that have finished.
import { choice, controls, el, fixed, headings, scrolling, svg } from "./dom.mjs";
import { divisor, path } from "./search.mjs";

const HEIGHT = 30, MARGIN = 6, GAP = 24;
const WIDEST = 112, NARROWEST = 66;  // of columns
const LETTER = 6.6;  // the mean width of one, in pixels
const MOST_BEAMS = 10;
const PACE = 700;  // milliseconds per step

/** The tree of the shown run up to the step that is chosen, with what plays it. */
export function beamTree(app) {
  const { t, state, run } = app, { plan } = state;
  if (!run.search) return [el("p", {}, t("computing"))];
  const { steps } = run.search;
  const shown = Math.min(state.step ?? steps.length, steps.length);
  const sizes = Array.from({ length: MOST_BEAMS }, (_, n) => [n + 1, n ? n + 1 : t("greedy")]);
  const search = controls(
    choice("beams", t("beams"), sizes, plan.num_beams, (value) => app.search({ num_beams: Number(value) })),
    slider("alpha", `${t("penalty")} α = ${fixed(plan.length_penalty, 1)}`, [0, 2, 0.1], plan.length_penalty,
      (value) => app.search({ length_penalty: value })));
  if (!steps.length) return [search, el("p", {}, t("greedyText"))];
  const label = t("step", { step: shown, steps: steps.length }), onclick = () => play(app, steps.length);
  const player = controls(
    slider("step", label, [1, steps.length, 1], shown, (step) => app.set({ step })),
    el("button", { type: "button", id: "play", onclick }, t(app.timer ? "pause" : "play")));
  const names = ["kept", "finished", "dropped"].map((name) => el("span", { class: name }, t(name)));
  return [
    search, player,
    scrolling(t("treeLabel"), picture(app, steps.slice(0, shown), shown === steps.length)),
    el("p", { class: "legend" }, ...names),
    hypotheses(app, steps[shown - 1]),
  ];
}

function slider(id, label, [min, max, step], value, onInput) {
  const input = el("input", { id, type: "range", min, max, step, value, oninput: () => onInput(Number(input.value)) });
  return el("label", {}, label, " ", input);
}

/** Shows step after step, or stops. */
function play(app, count) {
  if (app.timer) {
    app.stop();
    app.draw();
    return;
  }
  let step = (app.state.step ?? count) >= count ? 0 : app.state.step;
  const next = () => {
    step += 1;
    if (step >= count) app.stop();
    app.set({ step });
    const scroll = document.querySelector("#beam .scroll");
    scroll.scrollLeft = scroll.scrollWidth;  // as far as it goes
  };
  app.timer = setInterval(next, PACE);
  next();
}

/** How wide a column may be for all steps to fit into the page, unless that leaves no room for a token. */
function columnWidth(steps) {
  const page = document.getElementById("beam").querySelector(".view").clientWidth;
  return Math.max(NARROWEST, Math.min(WIDEST, Math.floor((page - 2 * MARGIN + GAP) / (steps + 1))));
}

function picture(app, steps, isComplete) {
  const width = columnWidth(app.run.search.steps.length), letters = Math.floor((width - GAP - 8) / LETTER);
  const places = new Map(), edges = [], boxes = [], best = new Set(), { shown } = app.tokenizer.target;
  for (let one = isComplete ? app.run.search.found[0]?.node : null; one; one = one.parent) best.add(one);
  const kind = (node, state) => `${state}${best.has(node) ? " best" : ""}`;
  const draw = (node, column, row, text, state) => {
    const x = MARGIN + column * width, y = MARGIN + row * HEIGHT;
    places.set(node, [x, y]);
    boxes.push(svg("g", { class: `node ${kind(node, state)}` },
      svg("title", {}, text), svg("rect", { x, y, width: width - GAP, height: HEIGHT - 6, rx: 4 }),
      svg("text", { x: x + 5, y: y + 11 }, shortened(text, letters)),
      svg("text", { x: x + 5, y: y + 21, class: "score" }, fixed(node.total))));
  };
  draw(steps[0].nodes[0].parent, 0, 0, shown[app.state.plan.start], "kept");
  steps.forEach(({ nodes }, column) => nodes.forEach((node, row) => {
    draw(node, column + 1, row, shown[node.token], node.state);
    const [x, y] = places.get(node), [x0, y0] = places.get(node.parent), half = (HEIGHT - 6) / 2;
    const from = `${x0 + width - GAP},${y0 + half}`, bends = `${x - GAP / 2},${y0 + half} ${x - GAP / 2},${y + half}`;
    edges.push(svg("path", { class: `edge ${kind(node, node.state)}`, d: `M${from} C${bends} ${x},${y + half}` }));
  }));
  const rows = Math.max(...steps.map(({ nodes }) => nodes.length));
  const whole = 2 * MARGIN + (steps.length + 1) * width - GAP, height = 2 * MARGIN + rows * HEIGHT;
  const size = { width: whole, height, viewBox: `0 0 ${whole} ${height}` };
  return svg("svg", { ...size, role: "img", "aria-label": app.t("treeLabel") }, ...edges, ...boxes);
}

function shortened(text, most) {
  const letters = [...text];
  return letters.length > most ? `${letters.slice(0, most - 1).join("")}…` : text;
}

/** The finished hypotheses after a step; the first is the translation at the end. */
function hypotheses(app, { finished }) {
  const { t, state, tokenizer } = app, formula = state.plan.is_gnmt ? "((5 + n) / 6)^α" : "n^α";
  if (!finished.length) return el("p", {}, t("noneFinished"));
  const rows = finished.map(({ node, length, score }) => el("tr", {},
    el("th", { scope: "row", dir: "auto" }, tokenizer.target.decode(path(node)) || "—"),
    el("td", {}, fixed(node.total)),
    el("td", {}, length), el("td", {}, fixed(divisor(state.plan, length))), el("td", {}, fixed(score, 3))));
  const head = headings(t("hypothesis"), "log P", "n", formula, t("score"));
  return scrolling(t("finishedTitle"),
    el("table", {}, el("caption", {}, t("finishedTitle")), head, el("tbody", {}, ...rows)));
}
