// Draws the page: the sentence and its translation, the switches, and the paper's sections, each when it is open.
import { App } from "./app.mjs";
import { drawAttention } from "./attention.mjs";
import { modelOf } from "./checkpoint.mjs";
import { attribution, bestTen, embeddings, forcing, tokens } from "./compare.mjs";
import { choice, el } from "./dom.mjs";
import { attentionPart } from "./layers.mjs";
import { links } from "./links.mjs";
import { Tokenizer } from "./tokenizer.mjs";
import { drawTour } from "./tour.mjs";
import { beamTree } from "./tree.mjs";

/** Key of the texts -> the paper's sections, the lines of code, and what draws the view. */
const SECTIONS = {
  tokens: ["5.1", ["tokens"], tokens],
  embeddings: ["3.4, 3.5", ["embedding", "positions"], embeddings],
  encoder: ["3.1, 3.2, 3.3", ["heads", "scores", "softmax", "average", "norm", "feed"], (app) => attentionPart(app, "encoder")],
  decoder: ["3.1, 3.2.3", ["causal", "masked"], (app) => attentionPart(app, "decoder")],
  cross: ["3.2.3", ["cross"], (app) => attentionPart(app, "cross")],
  softmax: ["3.4", ["projection"], bestTen],
  beam: ["6.1", ["search", "penalty"], beamTree],
  forcing: ["3.1", ["shifted"], forcing],
  attribution: ["3.2.3", ["average"], attribution],
};

const data = JSON.parse(document.getElementById("data").textContent);
const open = new Set();  // sections

function start() {
  if (data.attention) {
    drawAttention(data);
    return;
  }
  const app = new App(data, modelOf(data), new Tokenizer(data.tokenizer), (section) => (section ? drawSection(app, section) : draw(app)));
  globalThis.app = app;  // for readers' own questions in the console: app.run.logits, app.model ...
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => app.draw());
  if (app.state.text) app.translate(app.state.text);
  else app.draw();
}

/** Draws all that is visible; what has the focus keeps it. */
function draw(app) {
  const { id } = document.activeElement ?? {}, { language } = app.state;
  if (document.documentElement.lang !== app.t("lang") || !document.getElementById("overview")) build(app);
  document.documentElement.lang = app.t("lang");
  drawTop(app, language);
  for (const name of open) drawSection(app, name);
  drawTour(app, openSection);
  if (id && document.activeElement === document.body) document.getElementById(id)?.focus({ preventScroll: true });
}

/** Makes the parts that stay. */
function build(app) {
  const { t } = app, input = el("input", { id: "source", type: "text", value: app.state.text, dir: "auto", autocomplete: "off", spellcheck: "false" });
  const examples = data.examples.map((text) => el("button", { type: "button", class: "example", onclick: () => {
    input.value = text;
    app.translate(text);
  } }, text));
  const other = t("otherLanguage"), to = app.state.language === "en" ? "zh" : "en";
  document.body.replaceChildren(
    el("header", {}, el("h1", {}, data.title), el("p", {}, t("subtitle", { parameters: data.parameters.toLocaleString(t("lang")) })),
      el("div", { class: "buttons" }, el("button", { type: "button", id: "tour-start", onclick: () => app.set({ tour: 0 }) }, t("tour")),
        el("button", { type: "button", id: "language", lang: to, onclick: () => app.set({ language: to }) }, other))),
    el("main", {},
      el("div", { class: "stage" },
        el("section", { id: "sentence", "aria-label": t("sentence") },
          el("form", { onsubmit: (event) => {
            event.preventDefault();
            app.translate(input.value);
          } }, el("label", { for: "source" }, t("sentence")), el("div", { class: "row" }, input, el("button", { id: "translate" }, t("translate")))),
          el("div", { class: "examples" }, ...examples), el("p", { id: "problem", role: "alert" }),
          el("div", { id: "translations", "aria-live": "polite" })),
        el("section", { id: "overview", "aria-label": t("overview") }),
        el("section", { id: "switches", "aria-label": t("switches") })),
      el("h2", {}, t("sections")),
      ...Object.entries(SECTIONS).map(([name, [paper, lines]]) => el("details", {
        id: name, open: open.has(name), ontoggle: (event) => {
          event.target.open ? open.add(name) : open.delete(name);
          if (event.target.open) drawSection(app, name);
        },
      }, el("summary", {}, el("h3", {}, t(name)), el("span", {}, t("paperSection", { paper }))),
      el("p", {}, t(`${name}Text`)), code(app, lines), el("div", { class: "view" })))),
    el("footer", {}, el("p", {}, t("footer"))));
}

/** The lines of our code that compute a view. */
function code(app, names) {
  const lines = names.map((name) => data.code[name === "norm" ? data.config.norm_position : name]);
  return el("details", { class: "code" }, el("summary", {}, app.t("code")), el("ul", {}, ...lines.map(([file, number, text]) =>
    el("li", {}, `${file}, ${app.t("line", { number })}`, el("code", {}, text)))));
}

function drawTop(app) {
  const { t, plain, changed } = app, result = (name, run, id) => el("p", { class: "result" }, el("small", {}, name),
    el("output", { id, dir: "auto" }, run.text || "—"));
  document.getElementById("problem").textContent = app.problem ?? "";
  if (!plain) return;
  document.getElementById("translations").replaceChildren(result(t(changed ? "asTrained" : "translation"), plain, "translation"),
    ...(changed ? [result(t("switched"), changed, "switched")] : []));
  document.getElementById("overview").replaceChildren(links({
    id: "overview", keys: app.source, queries: app.targets, weights: app.overview(), chosen: app.state.place, onChoose: (n) => app.choose("cross", n),
    titles: [t("source"), t("target")], says: (from, to) => t("attendsTo", { from, to }), label: t("linesLabel"),
  }));
  document.getElementById("switches").replaceChildren(...switches(app));
}

function switches(app) {
  const { t, state: { options } } = app, own = data.config.norm_position, other = own === "post" ? "pre" : "post";
  const box = (name) => el("label", {}, el("input", {
    id: `switch-${name}`, type: "checkbox", checked: options[name], onchange: (event) => app.switch({ [name]: event.target.checked }),
  }), " ", t(`switch_${name}`));
  const heads = [["encoder", data.config.encoder_layers, data.config.encoder_attention_heads],
    ["decoder", data.config.decoder_layers, data.config.decoder_attention_heads],
    ["cross", data.config.decoder_layers, data.config.decoder_attention_heads]].flatMap(([part, layers, count]) =>
    Array.from({ length: layers * count }, (_, n) => ({ part, layer: Math.floor(n / count), head: n % count })));
  const value = (one) => (one ? `${one.part}-${one.layer}-${one.head}` : "");
  return [
    el("h2", {}, t("switches")), el("p", {}, t("switchesText")),
    el("div", { class: "switches" }, ...["positions", "causal", "residual", "scaled"].map(box),
      choice("switch-norm", t("switch_norm"), [["", t(own)], [other, t(other)]], options.norm ?? "", (norm) => app.switch({ norm: norm || null })),
      choice("switch-off", t("switch_off"), [["", t("none")], ...heads.map((one) => [value(one), t("headOf", {
        part: t(one.part), layer: one.layer + 1, head: one.head + 1 })])], value(options.off),
      (chosen) => app.switch({ off: heads.find((one) => value(one) === chosen) ?? null }))),
    ...(app.changed ? [el("h3", {}, t("logitsBeside", { position: app.state.place + 1 })), ...bestTen(app)] : []),
  ];
}

function drawSection(app, name) {
  if (app.plain) document.querySelector(`#${name} > .view`).replaceChildren(...SECTIONS[name][2](app).filter((part) => part));
}

function openSection(app, name) {
  open.add(name);
  document.getElementById(name).open = true;
  drawSection(app, name);
}

start();
