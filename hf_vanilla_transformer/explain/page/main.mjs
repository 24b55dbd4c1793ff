// Draws the page: the sentence and its translation, the switches, and the paper's sections, each when it is open.
import { App } from "./app.mjs";
import { drawAttention } from "./attention.mjs";
import { modelOf } from "./checkpoint.mjs";
import { attribution, bestTen, embeddings, forcing, tokens } from "./compare.mjs";
import { choice, el } from "./dom.mjs";
import { figure } from "./figure.mjs";
import { attentionPart } from "./layers.mjs";
import { links } from "./links.mjs";
import { tokenizersOf } from "./tokenizer.mjs";
import { drawTour } from "./tour.mjs";
import { beamTree } from "./tree.mjs";

const inside = (part) => (app) => attentionPart(app, part);
/** Key of the texts -> the paper's sections, the lines of code, and what draws the view. */
const SECTIONS = {
  tokens: ["5.1", ["tokens"], tokens],
  embeddings: ["3.4, 3.5", ["embedding", "positions"], embeddings],
  encoder: ["3.1, 3.2, 3.3", ["heads", "scores", "softmax", "average", "norm", "feed"], inside("encoder")],
  decoder: ["3.1, 3.2.3", ["causal", "masked"], inside("decoder")],
  cross: ["3.2.3", ["cross"], inside("cross")],
  softmax: ["3.4, 5.4", ["projection"], bestTen],
  beam: ["6.1", ["search", "penalty"], beamTree],
  forcing: ["3.1", ["shifted"], forcing],
  attribution: ["fig. 3–5", ["average"], attribution],
};

const data = JSON.parse(document.getElementById("data").textContent);
const opened = new Set();  // sections

function start() {
  if (data.attention) {
    drawAttention(data);
    return;
  }
  const app = new App(data, modelOf(data), tokenizersOf(data.tokenizer), (part) => draw(app, part));
  addEventListener("error", ({ message }) => document.getElementById("problem").append(message));
  globalThis.app = app;  // for readers' own questions in the console: app.run.logits, app.model ...
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => app.draw());
  if (app.state.text) app.translate(app.state.text);
  else app.draw();
}

/** Draws a section, the top, or all that is visible; what has the focus keeps it. */
function draw(app, part = null) {
  if (part && part !== "top") {
    drawSection(app, part);
    return;
  }
  const { id } = document.activeElement ?? {};
  if (document.documentElement.lang !== app.t("lang") || !document.getElementById("overview")) build(app);
  document.getElementById("problem").textContent = app.problem ?? "";
  if (app.plain) drawTop(app);
  if (!part) {
    for (const name of opened) drawSection(app, name);
    drawTour(app, openSection);
  }
  if (id && document.activeElement === document.body) document.getElementById(id)?.focus({ preventScroll: true });
}

/** Makes the parts that stay, in the state's language. */
function build(app) {
  const { t } = app, sections = Object.keys(SECTIONS).map((name) => section(app, name));
  document.documentElement.lang = t("lang");
  document.body.replaceChildren(
    header(app),
    el("main", {},
      el("div", { class: "stage" }, sentence(app), el("section", { id: "overview", "aria-label": t("overview") }),
        el("section", { id: "switches", "aria-label": t("switches") })),
      el("h2", {}, t("sections")), mapOfThePage(app), ...sections),
    el("footer", {}, el("p", {}, t("footer"))));
}

/** Figure 1: a box opens its section and goes there. */
function mapOfThePage(app) {
  const go = (name) => {
    openSection(app, name);
    const place = document.getElementById(name);
    place.scrollIntoView({ block: "start" });
    place.querySelector("summary").focus({ preventScroll: true });
  };
  return el("nav", { id: "figure", "aria-label": app.t("figure") }, figure(app.t, data.config, go),
    el("p", {}, app.t("figureText")));
}

function header(app) {
  const { t } = app, other = app.state.language === "en" ? "zh" : "en", button = (id, name, patch, lang = null) =>
    el("button", { type: "button", id, lang, onclick: () => app.set(patch) }, name);
  return el("header", {},
    el("h1", {}, data.title), el("p", {}, t("subtitle", { parameters: data.parameters.toLocaleString(t("lang")) })),
    el("div", { class: "buttons" }, button("tour-start", t("tour"), { tour: 0 }),
      button("language", t("otherLanguage"), { language: other }, other)));
}

function sentence(app) {
  const { t } = app, input = el("input", {
    id: "source", type: "text", value: app.state.text, dir: "auto", autocomplete: "off", spellcheck: "false",
  });
  const onsubmit = (event) => {
    event.preventDefault();
    app.translate(input.value);
  };
  const examples = data.examples.map((example) => el("button", { type: "button", class: "example", onclick: () => {
    input.value = example;
    app.translate(example);
  } }, example));
  return el("section", { id: "sentence", "aria-label": t("sentence") },
    el("form", { onsubmit }, el("label", { for: "source" }, t("sentence")),
      el("div", { class: "row" }, input, el("button", { id: "translate" }, t("translate")))),
    el("div", { class: "examples" }, ...examples), el("p", { id: "problem", role: "alert" }),
    el("div", { id: "translations", "aria-live": "polite" }));
}

function section(app, name) {
  const { t } = app, [paper, lines] = SECTIONS[name];
  const ontoggle = ({ target }) => (target.open ? openSection(app, name) : opened.delete(name));
  const text = name === "tokens" && data.tokenizer.line !== "tokens" ? t("piecesText") : t(`${name}Text`);
  return el("details", { id: name, open: opened.has(name), ontoggle },
    el("summary", {}, el("h3", {}, t(name)), el("span", {}, t("paperSection", { paper }))),
    el("p", {}, text), code(app, lines), el("div", { class: "view" }));
}

/** The lines of the package's code that compute a view. */
function code(app, names) {
  const own = { norm: data.config.norm_position, tokens: data.tokenizer.line };  // Marian's tokenizer has no line here
  const lines = names.map((name) => data.code[name in own ? own[name] : name]).filter((line) => line);
  const items = lines.map(([file, number, line]) =>
    el("li", {}, `${file}, ${app.t("line", { number })}`, el("code", {}, line)));
  return el("details", { class: "code" }, el("summary", {}, app.t("code")), el("ul", {}, ...items));
}

function drawTop(app) {
  const { t, plain, changed } = app, place = (id) => document.getElementById(id);
  const result = (id, name, run) => el("p", { class: "result" }, el("small", {}, t(name)),
    el("output", { id, dir: "auto" }, run.text || "—"));
  place("translations").replaceChildren(result("translation", changed ? "asTrained" : "translation", plain));
  if (changed) place("translations").append(result("switched", "switched", changed));
  place("overview").replaceChildren(links({
    id: "overview", keys: app.source, queries: app.targets, weights: app.overview(), chosen: app.state.place,
    onChoose: (n) => app.choose("cross", n), titles: [t("source"), t("target")],
    says: (from, to) => t("attendsTo", { from, to }), label: t("linesLabel"),
  }));
  place("switches").replaceChildren(...switches(app));
}

function switches(app) {
  const { t, state: { options, place } } = app;
  const own = data.config.norm_position, other = own === "post" ? "pre" : "post";
  const box = (name) => {
    const onchange = (event) => app.switch({ [name]: event.target.checked });
    const input = el("input", { id: `switch-${name}`, type: "checkbox", checked: options[name], onchange });
    return el("label", {}, input, " ", t(`switch_${name}`));
  };
  const heads = allHeads(), value = (one) => (one ? `${one.part}-${one.layer}-${one.head}` : "");
  const named = ({ part, layer, head }) => t("headOf", { part: t(part), layer: layer + 1, head: head + 1 });
  const norms = [["", t(own)], [other, t(other)]];
  const kept = [["", t("none")], ...heads.map((one) => [value(one), named(one)])];
  const turnOff = (chosen) => app.switch({ off: heads.find((one) => value(one) === chosen) ?? null });
  return [
    el("h2", {}, t("switches")), el("p", {}, t("switchesText")),
    el("div", { class: "switches" }, ...["positions", "causal", "residual", "scaled"].map(box),
      choice("switch-norm", t("switch_norm"), norms, options.norm ?? "", (norm) => app.switch({ norm: norm || null })),
      choice("switch-off", t("switch_off"), kept, value(options.off), turnOff)),
    ...(app.changed ? [el("h3", {}, t("logitsBeside", { position: place + 1 })), ...bestTen(app)] : []),
  ];
}

/** Every head of the model: {part, layer, head}. */
function allHeads() {
  return ["encoder", "decoder", "cross"].flatMap((part) => {
    const stack = part === "encoder" ? "encoder" : "decoder", count = data.config[`${stack}_attention_heads`];
    const place = (n) => ({ part, layer: Math.floor(n / count), head: n % count });
    return Array.from({ length: data.config[`${stack}_layers`] * count }, (_, n) => place(n));
  });
}

function drawSection(app, name) {
  if (!app.plain) return;
  const view = document.querySelector(`#${name} > .view`), places = scrolled(view).map((part) => part.scrollLeft);
  view.replaceChildren(...SECTIONS[name][2](app).filter((part) => part));
  scrolled(view).forEach((part, n) => (part.scrollLeft = places[n] ?? 0));
}

function scrolled(view) {
  return [...view.querySelectorAll(".scroll")];
}

function openSection(app, name) {
  opened.add(name);
  document.getElementById(name).open = true;
  drawSection(app, name);
}

start();
