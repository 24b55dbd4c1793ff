// Pieces of words: SentencePiece's (unigram and BPE), subword-nmt's, or words as they are. Python refuses all others.
import { bytesOf } from "./checkpoint.mjs";

const MARK = "▁";  // a space within pieces
const WORD_END = "</w>", GOES_ON = "@@";  // of subword-nmt
// Python's white space is another set than JavaScript's.
const BLANKS = "[\\t-\\r\\x1c-\\x20\\x85\\xa0\\u1680\\u2000-\\u200a\\u2028\\u2029\\u202f\\u205f\\u3000]+";
const UNKNOWN_COSTS = 10;  // less than the lowest score

const stripped = (text) => text.replace(new RegExp(`^${BLANKS}|${BLANKS}$`, "g"), "");
const byBlanks = (text) => text.split(new RegExp(BLANKS)).filter((word) => word);

/**
 * Joins neighbours as long as two of them have a rank: those of the lowest rank first, of equal ones the leftmost.
 * `everywhere`: all occurrences of the same two at once.
 */
export function merged(letters, rankOf, everywhere = false) {
  const pieces = [...letters];
  for (;;) {
    let best = Infinity, place = -1;
    for (let n = 0; n + 1 < pieces.length; n++) {
      const rank = rankOf(pieces[n], pieces[n + 1]) ?? Infinity;
      if (rank < best) [best, place] = [rank, n];
    }
    if (place < 0) return pieces;
    const [left, right] = pieces.slice(place, place + 2);
    do {
      if (pieces[place] === left && pieces[place + 1] === right) pieces.splice(place, 2, left + right);
    } while (everywhere && ++place + 1 < pieces.length);
  }
}

/** A SentencePiece model: `scores` has its pieces. */
class SentencePiece {
  constructor({ pieces, scores, charsmap, ...others }) {
    const numbers = new Float32Array(bytesOf(scores).buffer), map = bytesOf(charsmap);
    Object.assign(this, others);
    this.scores = new Map(pieces.map((piece, n) => [piece, numbers[n]]));
    this.unknownScore = Math.fround(numbers.reduce((a, b) => Math.min(a, b), Infinity) - UNKNOWN_COSTS);
    this.longest = Math.max(...pieces.map((piece) => [...piece].length));
    // The rules for characters: the size of a trie in bytes, the trie (a double array, as Darts has it), and texts.
    const size = map.length ? new DataView(map.buffer).getUint32(0, true) : 0;
    this.trie = new Uint32Array(map.slice(4, 4 + size).buffer);
    this.texts = map.subarray(4 + size);
  }

  pieces(text) {
    const letters = [...this.normalized(text)], found = [];
    const rankOf = (left, right) => this.scores.has(left + right) ? -this.scores.get(left + right) : undefined;
    let wasUnknown = false;
    for (const piece of this.is_unigram ? this.mostProbable(letters) : merged(letters, rankOf)) {
      const isUnknown = !this.scores.has(piece);
      if (isUnknown && this.has_bytes) {
        const bytes = Array.from(new TextEncoder().encode(piece), (byte) => byte.toString(16).padStart(2, "0"));
        found.push(...bytes.map((byte) => `<0x${byte.toUpperCase()}>`));
      } else if (isUnknown && wasUnknown) found.push(found.pop() + piece);
      else found.push(piece);
      wasUnknown = isUnknown;
    }
    return found;
  }

  /** The text by the rules for characters, with the mark for spaces. */
  normalized(text) {
    const bytes = new TextEncoder().encode(text), parts = [];
    for (let place = 0; place < bytes.length;) {
      const [part, length] = this.ruled(bytes, place);
      parts.push(part);
      place += length;
    }
    if (this.trims) while (parts[0] === " ") parts.shift();
    if (!parts.length) return "";
    let result = this.begins_with_space ? MARK : "", isBehindSpace = this.trims;
    for (const part of parts) {
      const own = isBehindSpace ? part.replace(/^ +/, "") : part;
      if (own) isBehindSpace = own.endsWith(" ");
      if (!this.trims) isBehindSpace = false;
      result += own.replaceAll(" ", MARK);
    }
    return this.trims ? result.replace(/▁+$/, "") : result;
  }

  /** What the longest rule at a place says, or the character there; and the bytes that it takes. */
  ruled(bytes, place) {
    const offset = (unit) => (unit >>> 10) << ((unit & 512) >>> 6);
    let node = this.trie.length ? offset(this.trie[0]) : 0, text = null, length = 0;
    for (let n = place; this.trie.length && n < bytes.length; n++) {
      const unit = this.trie[node ^ bytes[n]];
      if ((unit & 0x800000ff) !== bytes[n]) break;
      node ^= bytes[n] ^ offset(unit);
      if (unit & 256) [text, length] = [this.trie[node] & 0x7fffffff, n + 1 - place];
    }
    const decode = (own) => new TextDecoder("utf-8", { ignoreBOM: true }).decode(own);
    if (text !== null) return [decode(this.texts.subarray(text, this.texts.indexOf(0, text))), length];
    const first = bytes[place], size = first < 0xc0 ? 1 : first < 0xe0 ? 2 : first < 0xf0 ? 3 : 4;
    return [decode(bytes.subarray(place, place + size)), size];
  }

  /** The most probable division of characters into pieces (Viterbi); sums are rounded as SentencePiece rounds them. */
  mostProbable(letters) {
    const ends = [{ total: 0 }, ...letters.map(() => ({ total: -Infinity }))];
    letters.forEach((letter, start) => {
      const { total: before } = ends[start];
      let piece = "";
      for (let end = start + 1; end <= Math.min(letters.length, start + this.longest); end++) {
        piece += letters[end - 1];
        const score = this.scores.get(piece) ?? (end === start + 1 ? this.unknownScore : -Infinity);
        const total = Math.fround(score + before);
        if (total > ends[end].total) ends[end] = { total, start };
      }
    });
    const found = [];
    for (let end = letters.length; end > 0; end = ends[end].start) {
      found.unshift(letters.slice(ends[end].start, end).join(""));
    }
    return found;
  }

  text(pieces) {
    const bytes = [];
    let text = "", isBegin = true, hadSpace = false;
    for (const piece of pieces) {
      const [, byte] = (this.has_bytes && /^<0x([0-9A-F]{2})>$/.exec(piece)) || [];
      if (byte) {
        bytes.push(parseInt(byte, 16));
        continue;
      }
      text += charactersOf(bytes.splice(0));
      if (hadSpace || text) isBegin = false;
      const drops = isBegin && (this.begins_with_space || this.trims) && piece.startsWith(MARK);
      hadSpace = drops && !this.trims;
      if (piece === this.unknown) text += this.unknown_surface;
      else if (!this.known.includes(piece) && !this.scores.has(piece)) text += piece;
      else if (!this.control.includes(piece)) text += piece.slice(drops ? 1 : 0).replaceAll(MARK, " ");
    }
    return text + charactersOf(bytes);
  }
}

/** The characters of UTF-8, with U+FFFD for each byte that belongs to none. */
function charactersOf(bytes) {
  const decoder = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });
  let text = "";
  for (let place = 0; place < bytes.length;) {
    const size = [1, 2, 3, 4].find((length) => {
      try {
        return [...decoder.decode(new Uint8Array(bytes.slice(place, place + length)))].length === 1;
      } catch {
        return false;
      }
    });
    text += size ? decoder.decode(new Uint8Array(bytes.slice(place, place + size))) : "\ufffd";
    place += size ?? 1;
  }
  return text;
}

/** The codes of subword-nmt. */
class Codes {
  constructor(codes) {
    const trimmed = (line) => line.replace(/^[\r\n ]+|[\r\n ]+$/g, ""), lines = codes.split("\n");
    const version = lines[0].startsWith("#version:") ? lines.shift() : "0.1";
    this.hasOwnEnd = /\b0\.1\s*$/.test(version);
    this.ranks = new Map(lines.map((line, rank) => [trimmed(line), rank]).reverse());
    this.trimmed = trimmed;
  }

  pieces(text) {
    return this.trimmed(text).split(" ").filter((word) => word).flatMap((word) => this.piecesOf(word));
  }

  piecesOf(word) {
    const letters = [...word];
    if (letters.length === 1) return letters;
    if (this.hasOwnEnd) letters.push(WORD_END);
    else letters.push(letters.pop() + WORD_END);
    const found = merged(letters, (left, right) => this.ranks.get(`${left} ${right}`), true);
    const last = found.pop();
    if (last !== WORD_END) found.push(last.endsWith(WORD_END) ? last.slice(0, -WORD_END.length) : last);
    return found.map((piece, n) => (n + 1 < found.length ? piece + GOES_ON : piece));
  }

  text(pieces) {
    return `${pieces.join(" ")} `.replaceAll(`${GOES_ON} `, "").replace(new RegExp(`${BLANKS}$`), "");
  }
}

const joinedBySpaces = (pieces) => pieces.join(" ");
const LEVELS = {
  words: { pieces: byBlanks, text: joinedBySpaces },
  word: { pieces: (text) => text.split(" "), text: joinedBySpaces },
  char: {
    pieces: (text) => [...text.replaceAll(" ", MARK)], text: (pieces) => pieces.join("").replaceAll(MARK, " "),
  },
};

/** The tokenizer of a vocabulary, for texts of one side: Marian's, or of the package's dictionaries. */
export class PieceTokenizer {
  constructor({ tokens, added, special, unknown, end, sentencepiece, codes, level, is_marian: isMarian }) {
    Object.assign(this, { tokens, shown: tokens, special: new Set(special), unknown, end, level, isMarian });
    this.ids = new Map([...tokens.map((token, id) => [token, id]), ...Object.entries(added)]);
    this.model = sentencepiece ? new SentencePiece(sentencepiece) : level ? LEVELS[level] : new Codes(codes);
    this.spelling = this.model;
    const names = Object.keys(added).sort((one, other) => other.length - one.length);
    this.added = new RegExp(`(${names.map((name) => name.replace(/\W/g, "\\$&")).join("|")})`);
  }

  /** The ids of a text, with the end of sentence if there is one. */
  encode(text) {
    const pieces = this.isMarian ? text.split(this.added).flatMap((part, n) => (n % 2 ? [part] : this.coded(part)))
      : this.level ? this.model.pieces(text) : byBlanks(this.model.pieces(text).join(" "));
    const ids = pieces.map((piece) => this.ids.get(piece) ?? this.unknown);
    return this.end === null ? ids : [...ids, this.end];
  }

  /** Pieces behind the code of a language, ">>deu<<". */
  coded(text) {
    const length = text.startsWith(">>") && text.includes("<<") ? text.indexOf("<<") + 2 : 0;
    return [...(length ? [text.slice(0, length)] : []), ...this.model.pieces(text.slice(length))];
  }

  /** The text of ids; special tokens spell nothing, and end a word in all but Marian's. */
  decode(ids) {
    const runs = [[]];
    for (const id of ids) {
      if (!this.special.has(id)) runs.at(-1).push(this.tokens[id]);
      else if (!this.isMarian) runs.push([]);
    }
    const text = runs.map((run) => this.spelling.text(run)).filter((part) => part).join(" ");
    if (this.level === "char") return text;
    return stripped(this.isMarian ? text.replaceAll(MARK, " ") : text);
  }
}
