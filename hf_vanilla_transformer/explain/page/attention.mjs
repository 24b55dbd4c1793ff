// The page without a model: the attention of one sentence, computed before.
import { text } from "./app.mjs";
import { bytesOf } from "./checkpoint.mjs";
import { choice, controls, el, matrix, numbered } from "./dom.mjs";
import { links } from "./links.mjs";

/** Draws the three attentions of the page's data, with a choice of part, layer and head. */
export function drawAttention(data) {
  const { source, inputs, targets, parts } = data.attention;
  const t = (key, values) => text(data, data.language, key, values);
  const sides = { encoder: [source, source], decoder: [inputs, targets], cross: [source, targets] };
  const read = Object.fromEntries(Object.entries(parts).map(([part, { weights }]) => [part, bytesOf(weights)]));
  const state = { part: "cross", layer: parts.cross.layers - 1, head: "mean", place: 0 };

  /** Rows of weights of a head, from 255ths, or of the mean of all. */
  function rows() {
    const { part, layer, head } = state, { heads } = parts[part], [keys, queries] = sides[part];
    const used = head === "mean" ? numbered(heads).map(([n]) => n) : [Number(head)];
    const size = keys.length * queries.length;
    const weight = (row, key) => used.reduce(
      (sum, one) => sum + read[part][(layer * heads + one) * size + row * keys.length + key], 0) / used.length / 255;
    return queries.map((_, row) => Array.from(
      { length: part === "decoder" ? row + 1 : keys.length }, (_, key) => weight(row, key)));
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
    const names = Object.keys(sides).map((one) => [one, t(`${one}Attention`)]);
    const heads = [["mean", t("mean")], ...numbered(parts[part].heads)];
    const label = t("matrixOf", { head: head === "mean" ? t("mean") : Number(head) + 1 });
    document.body.replaceChildren(el("header", {}, el("h1", {}, data.title)), el("main", {},
      controls(
        choice("part", t("attention"), names, part, (one) => set({ part: one })),
        choice("layer", t("layer"), numbered(parts[part].layers), layer, (value) => set({ layer: Number(value) })),
        choice("head", t("head"), heads, head, (value) => set({ head: value }))),
      links({
        id: "links", keys, queries, weights, chosen: place, onChoose: (n) => set({ place: n }),
        titles: [t(part === "decoder" ? "earlier" : "source"), t(part === "encoder" ? "source" : "target")],
        says: (from, to) => t("attendsTo", { from, to }), label: t("linesLabel"),
      }),
      matrix(weights, keys.length, label, place, (n) => set({ place: n })),
      el("p", {}, t("matrixText"))));
  }

  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  document.documentElement.lang = t("lang");
  draw();
}
