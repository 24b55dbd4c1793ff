// Section 5.1: the package's byte-level BPE; and the tokenizers of source and target.
import { merged, PieceTokenizer } from "./pieces.mjs";

// Where words begin; the two rules of the package's tokenizer. `\s` of JavaScript is another set of characters.
const WORD_START = /(?<![\p{White_Space}\p{P}])\p{White_Space}+(?![\p{White_Space}\p{P}])/gu;
const SPACE = "\\p{White_Space}", WORD = `[^${SPACE}\\p{P}]+`;
const WORD_OR_PUNCTUATION = new RegExp(`${SPACE}?${WORD}|${SPACE}?\\p{P}+|${SPACE}+(?=${SPACE})|${SPACE}+`, "gu");
const CONTROL_TOKEN_END = /(?<=<pad|<s|<\/s)>/gu;
const LONGEST_WORD = 256;

/** Cuts a text before each match. */
function cutBefore(text, pattern) {
  const places = [0, ...Array.from(text.matchAll(pattern), (match) => match.index), text.length];
  return places.slice(1).map((end, n) => text.slice(places[n], end)).filter((part) => part);
}

/** Cuts a text into its words, each with the space before it. */
export function wordsOf(text, mergesPunctuation) {
  const words = mergesPunctuation ? cutBefore(text, WORD_START) : text.match(WORD_OR_PUNCTUATION) ?? [];
  return words.flatMap((word) => cutBefore(word, CONTROL_TOKEN_END)).flatMap((word) => {
    const letters = [...word], parts = [];
    for (let start = 0; start < letters.length; start += LONGEST_WORD) {
      parts.push(letters.slice(start, start + LONGEST_WORD).join(""));
    }
    return parts;
  });
}

export class ByteTokenizer {
  /**
   * `pieces` lists the vocabulary by ids, `shown` how people read them; `merges` the merges, "a b", in the order in
   * which they are made.
   */
  constructor({ pieces, shown, merges, letters, special, end, merges_punctuation: mergesPunctuation }) {
    Object.assign(this, { pieces, shown, special: new Set(special), end, mergesPunctuation });
    this.ids = new Map(pieces.map((piece, id) => [piece, id]));
    this.ranks = new Map(merges.map((merge, rank) => [merge, rank]));
    this.letters = letters;  // of the bytes 0 to 255
    this.bytes = new Map(letters.map((letter, byte) => [letter, byte]));
  }

  /** The ids of a text, with the end of sentence. */
  encode(text) {
    const words = wordsOf(text, this.mergesPunctuation).map((word) =>
      Array.from(new TextEncoder().encode(word), (byte) => this.letters[byte]));
    const rankOf = (left, right) => this.ranks.get(`${left} ${right}`);
    words[0]?.unshift(this.letters[32]);  // the first word gets a space too
    return [...words.flatMap((word) => merged(word, rankOf).map((piece) => this.ids.get(piece))), this.end];
  }

  /** The text of ids, without special tokens. */
  decode(ids) {
    const letters = ids.filter((id) => !this.special.has(id)).map((id) => this.pieces[id]).join("");
    const bytes = Array.from(letters, (letter) => this.bytes.get(letter));
    return new TextDecoder("utf-8", { ignoreBOM: true }).decode(new Uint8Array(bytes)).replace(/^ /, "");
  }
}

/** The tokenizers of source and target, which may be one. */
export function tokenizersOf({ sides, spells_by_source: spellsBySource }) {
  const make = (side) => (side.letters ? new ByteTokenizer(side) : new PieceTokenizer(side));
  const [source, target = source] = sides.map(make);
  if (spellsBySource) target.spelling = source.model;
  return { source, target };
}

/** The first of Python's samples that is read or written otherwise here, or undefined. */
export function misread({ source, target }, samples) {
  const differ = (ids, others) => ids.join() !== others.join();
  const found = samples.find(([text, ids, targets, spelled]) =>
    differ(source.encode(text), ids) || differ(target.encode(text), targets) || target.decode(targets) !== spelled);
  return found?.[0];
}
