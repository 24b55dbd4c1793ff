// The page without a model: the attention of one sentence, computed before.
import { bytesOf } from "./checkpoint.mjs";
import { choice, el, matrix, numbered } from "./dom.mjs";
import { links } from "./links.mjs";

/** Draws the three attentions of the page's data, with a choice of part, layer and head. */
export function drawAttention(data) {
  const { source, inputs, targets, parts } = data.attention, t = (key, values = {}) =>
    (data.texts[key]?.[data.language] ?? key).replace(/\{(\w+)\}/g, (_, name) => values[name]);
  const sides = { encoder: [source, source], decoder: [inputs, targets], cross: [source, targets] };
  const read = Object.fromEntries(Object.entries(parts).map(([part, { weights }]) => [part, bytesOf(weights)]));
  const state = { part: "cross", layer: parts.cross.layers - 1, head: "mean", place: 0 };

  /** Rows of weights of a head, from 255ths, or of the mean of all. */
  function rows() {
    const { part, layer, head } = state, { heads } = parts[part], [keys, queries] = sides[part], size = keys.length * queries.length;
    const used = head === "mean" ? Array.from({ length: heads }, (_, n) => n) : [Number(head)];
    return queries.map((_, row) => {
      const count = part === "decoder" ? row + 1 : keys.length;
      return Array.from({ length: count }, (_, key) => used.reduce(
        (sum, one) => sum + read[part][(layer * heads + one) * size + row * keys.length + key], 0) / used.length / 255);
    });
  }

  function set(patch) {
    const { id } = document.activeElement;
    Object.assign(state, patch);
    state.layer = Math.min(state.layer, parts[state.part].layers - 1);
    if (Number(state.head) >= parts[state.part].heads) state.head = "mean";
    state.place = Math.min(state.place, sides[state.part][1].length - 1);
    draw();
    document.getElementById(id)?.focus({ preventScroll: true });
  }

  function draw() {
    const { part, layer, head, place } = state, [keys, queries] = sides[part], weights = rows();
    const isTarget = part !== "encoder";
    document.body.replaceChildren(el("header", {}, el("h1", {}, data.title)), el("main", {},
      el("form", { class: "choices", onsubmit: (event) => event.preventDefault() },
        choice("part", t("attention"), ["encoder", "decoder", "cross"].map((one) => [one, t(`${one}Attention`)]), part, (one) => set({ part: one })),
        choice("layer", t("layer"), numbered(parts[part].layers, ""), layer, (value) => set({ layer: Number(value) })),
        choice("head", t("head"), [["mean", t("mean")], ...numbered(parts[part].heads, "")], head, (value) => set({ head: value }))),
      links({
        id: "links", keys, queries, weights, chosen: place, onChoose: (n) => set({ place: n }),
        titles: [t(part === "decoder" ? "earlier" : "source"), t(isTarget ? "target" : "source")],
        says: (from, to) => t("attendsTo", { from, to }), label: t("linesLabel"),
      }),
      matrix(weights, keys.length, t("matrixOf", { head: head === "mean" ? t("mean") : Number(head) + 1 }), place, (n) => set({ place: n })),
      el("p", {}, t("matrixText"))));
  }

  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  document.documentElement.lang = t("lang");
  draw();
}
