// Figure 1 of the paper as the page's map: a box opens the section that shows it.
import { svg } from "./dom.mjs";

const MAP = [430, 346], BOX = 148, LINE = 28, NORM = 13;
const ENCODER = 40, DECODER = 240;  // where the columns begin
const PAD = 12;  // between a column and the frame around its layers

/** Section, text, column, top; and whether the box is a sub-layer, with a residual connection and LayerNorm. */
const BOXES = [
  ["beam", "figureSearch", DECODER, 2],
  ["softmax", "figureSoftmax", DECODER, 40],
  ["cross", "figureFeed", DECODER, 102, true],
  ["cross", "figureAttention", DECODER, 154, true],
  ["decoder", "figureMasked", DECODER, 206, true],
  ["encoder", "figureFeed", ENCODER, 154, true],
  ["encoder", "figureAttention", ENCODER, 206, true],
  ["embeddings", "figureEmbeddings", ENCODER, 266],
  ["embeddings", "figureEmbeddings", DECODER, 266],
  ["tokens", "figureInputs", ENCODER, 314],
  ["forcing", "figureOutputs", DECODER, 314],
];

/** Draws the map for a model with LayerNorm after or before its sub-layers; `onOpen` is told a section. */
export function figure(t, config, onOpen) {
  const isPre = config.norm_position === "pre";
  const norm = (x, y) => box(x, isPre ? y + LINE : y - NORM, NORM, t(isPre ? "figureNorm" : "figureAddNorm"), "norm");
  const frames = [
    [ENCODER, 130, config.encoder_layers, "end", -PAD - 4],
    [DECODER, 78, config.decoder_layers, "start", BOX + PAD + 4],
  ];
  const middle = BOX / 2, meeting = (ENCODER + BOX + DECODER) / 2;
  const arrows = [
    `M${ENCODER + middle},314 V120 H${meeting} V168 H${DECODER}`, `M${DECODER + middle},314 V30`,
  ].map((d) => svg("path", { class: "edge", d }));
  const around = frames.map(([x, y, layers, side, beside]) => svg("g", {},
    svg("rect", { class: "frame", x: x - PAD, y, width: BOX + 2 * PAD, height: 250 - y, rx: 10 }),
    svg("text", { x: x + beside, y: (y + 250) / 2, "text-anchor": side }, `${layers}×`)));
  const boxes = BOXES.map(([id, text, x, y, isSublayer]) => svg("a", {
    href: `#${id}`, "aria-label": `${t(text)}: ${t(id)}`, onclick: (event) => {
      event.preventDefault();
      onOpen(id);
    },
  }, ...box(x, y, LINE, t(text)), ...(isSublayer ? norm(x, y) : [])));
  return svg("svg", { viewBox: `0 0 ${MAP[0]} ${MAP[1]}`, role: "group", "aria-label": t("figure") },
    ...arrows, ...around, ...boxes);
}

function box(x, y, height, text, kind = null) {
  return [
    svg("rect", { class: kind, x, y, width: BOX, height, rx: 4 }),
    svg("text", { class: kind, x: x + BOX / 2, y: y + height / 2, "text-anchor": "middle" }, text),
  ];
}
