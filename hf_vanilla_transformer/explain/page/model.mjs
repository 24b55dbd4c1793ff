// The model file's formulas, section by section. Options switch parts of them off; a record, where one is given, keeps
// the numbers in between. Shapes: S source and T target positions, h heads of width d_k, V tokens.
import { ACTIVATIONS, add, dot, layerNorm, linear, rowsOf, softmax } from "./tensor.mjs";

/** What can be switched: `norm` is "post", "pre" or null for the model's own; `off` is {part, layer, head} or null. */
export const UNTOUCHED = { positions: true, causal: true, residual: true, scaled: true, norm: null, off: null };

/** Section 3.5: the encoding of one position, (d,). */
export function sinusoid(position, d, encoding) {
  const isPaper = encoding === "paper", hasHalves = encoding === "tensor2tensor" || encoding === "fairseq";
  const half = hasHalves ? Math.floor(d / 2) : Math.ceil(d / 2);
  return Float32Array.from({ length: d }, (_, column) => {
    if (!isPaper && column >= 2 * half) return 0;
    const i = isPaper ? Math.floor(column / 2) : column % half;
    const isSine = isPaper ? column % 2 === 0 : column < half;
    const angle = position / 10000 ** (hasHalves ? i / Math.max(half - 1, 1) : (2 * i) / d);
    return isSine ? Math.sin(angle) : Math.cos(angle);
  });
}

/** The model, of its configuration and of `tensors`: name in the checkpoint -> numbers, row by row. */
export class Model {
  constructor(config, tensors) {
    this.config = config;
    this.encoder = this.stack("encoder", tensors);
    this.decoder = this.stack("decoder", tensors);
    this.projection = { weight: tensors["lm_head.weight"], bias: tensors["lm_head.bias"] };
    this.activation = ACTIVATIONS[config.activation_function];
  }

  stack(name, tensors) {
    const module = (path) => ({ weight: tensors[`${path}.weight`], bias: tensors[`${path}.bias`] });
    const attention = (path) => Object.fromEntries(
      ["q_proj", "k_proj", "v_proj", "out_proj"].map((part) => [part, module(`${path}.${part}`)]));
    const layers = Array.from({ length: this.config[`${name}_layers`] }, (_, number) => {
      const path = `model.${name}.layers.${number}`, isDecoder = name === "decoder";
      return {
        attention: attention(`${path}.self_attn`), attentionNorm: module(`${path}.self_attn_layer_norm`),
        cross: isDecoder && attention(`${path}.encoder_attn`), crossNorm: module(`${path}.encoder_attn_layer_norm`),
        fc1: module(`${path}.feed_forward.fc1`), fc2: module(`${path}.feed_forward.fc2`),
        lastNorm: module(`${path}.final_layer_norm`),
      };
    });
    const path = `model.${name}`;
    return {
      layers, heads: this.config[`${name}_attention_heads`], norm: module(`${path}.layer_norm`),
      tokens: tensors[`${path}.embed_tokens.weight`], learned: tensors[`${path}.embed_positions.weight`],
    };
  }

  /** Sections 3.4 and 3.5: sqrt(d_model) times the embeddings, plus positions, (n, d_model). */
  embed(stack, ids, positions, options, record) {
    const d = this.config.d_model, x = new Float32Array(ids.length * d), { learned } = stack;
    ids.forEach((id, row) => {
      const own = stack.tokens.subarray(id * d, (id + 1) * d);
      const embedding = own.map((value) => value * this.config.embedding_scale);
      const place = options.positions ? this.position(positions[row], learned) : new Float32Array(d);
      x.set(add(embedding, place), row * d);
      record?.push({ embedding, place, sum: x.subarray(row * d, (row + 1) * d) });
    });
    return x;
  }

  position(number, learned) {
    const { d_model: d, position_encoding: encoding, max_position_embeddings: rows } = this.config;
    if (!learned) return sinusoid(number + this.config.first_position, d, encoding);
    if (number >= rows) throw new RangeError(`the model has ${rows} positions`);
    return learned.subarray(number * d, (number + 1) * d);
  }

  /**
   * Section 3.2: attention of x, (n, d_model). `visible(row)` gives the keys and values that a row may look at: lists
   * of rows, and how many of them count.
   */
  attend(part, layer, weights, heads, x, n, visible, options, record) {
    const queries = linear(x, n, weights.q_proj), dk = queries.length / n / heads;
    const width = weights.v_proj.weight.length / this.config.d_model, dv = width / heads;
    const joined = new Float32Array(n * width);
    const scale = options.scaled ? dk ** -0.5 : 1, { off } = options;
    const kept = record && Array.from({ length: heads }, () => []);
    for (let row = 0; row < n; row++) {
      const { keys, values, count } = visible(row);
      for (let head = 0; head < heads; head++) {
        const scores = new Float32Array(count);
        for (let key = 0; key < count; key++) {
          scores[key] = dot(queries, row * heads * dk + head * dk, keys[key], head * dk, dk) * scale;
        }
        softmax(scores);  // equation 1; from here on these are weights
        kept?.[head].push(scores);
        if (off && off.part === part && off.layer === layer && off.head === head) continue;
        const place = row * width + head * dv;
        for (let key = 0; key < count; key++) {
          for (let c = 0; c < dv; c++) joined[place + c] += scores[key] * values[key][head * dv + c];
        }
      }
    }
    if (record) Object.assign(record, { dk, dv, scale, queries: rowsOf(queries, n), visible, weights: kept });
    return linear(joined, n, weights.out_proj);
  }

  /** Section 3.1: the residual connection and LayerNorm around a sub-layer, in the order of the options. */
  around(x, n, norm, sublayer, options, record) {
    const isPre = (options.norm ?? this.config.norm_position) === "pre", epsilon = this.config.layer_norm_eps;
    const update = sublayer(isPre ? layerNorm(x, n, norm, epsilon) : x);
    const sum = options.residual ? add(x, update) : update;
    const result = isPre ? sum : layerNorm(sum, n, norm, epsilon);
    if (record) Object.assign(record, { before: x, update, sum, result, isPre });
    return result;
  }

  /** Section 3.3: the feed-forward network. */
  feedForward(layer, x, n, record) {
    const inner = linear(x, n, layer.fc1).map(this.activation);
    if (record) record.inner = inner;
    return linear(inner, n, layer.fc2);
  }

  end(stack, x, n) {
    return this.config.final_layer_norm ? layerNorm(x, n, stack.norm, this.config.layer_norm_eps) : x;
  }

  /** Encodes ids, (S,): the keys and values of the source for each decoder layer, lists of S rows. */
  encode(ids, options, record = null) {
    const n = ids.length, { encoder: stack } = this;
    let x = this.embed(stack, ids, ids.map((_, place) => place), options, record?.embedded);
    stack.layers.forEach((layer, number) => {
      const kept = record?.layer(number);
      x = this.around(x, n, layer.attentionNorm, (input) => {
        const [keys, values] = this.keysAndValues(layer.attention, input, n), seen = { keys, values, count: n };
        return this.attend("encoder", number, layer.attention, stack.heads, input, n, () => seen, options, kept?.self);
      }, options, kept?.self);
      const feed = (input) => this.feedForward(layer, input, n, kept?.feed);
      x = this.around(x, n, layer.lastNorm, feed, options, kept?.feed);
    });
    x = this.end(stack, x, n);
    return this.decoder.layers.map(({ cross }) => {
      const [keys, values] = this.keysAndValues(cross, x, n);
      return { keys, values, count: n };
    });
  }

  keysAndValues(weights, x, n) {
    return [rowsOf(linear(x, n, weights.k_proj), n), rowsOf(linear(x, n, weights.v_proj), n)];
  }

  /**
   * Decodes n rows, each at its position: (n, d_model). `visible(layer, keys, values)` is told the rows' own keys and
   * values in a layer, and gives what `attend` asks for.
   */
  decodeRows(ids, positions, memory, visible, options, record) {
    const n = ids.length, { decoder: stack } = this;
    let x = this.embed(stack, ids, positions, options, record?.embedded);
    stack.layers.forEach((layer, number) => {
      const kept = record?.layer(number);
      x = this.around(x, n, layer.attentionNorm, (input) => {
        const own = visible(number, ...this.keysAndValues(layer.attention, input, n));
        return this.attend("decoder", number, layer.attention, stack.heads, input, n, own, options, kept?.self);
      }, options, kept?.self);
      const source = () => memory[number];
      const cross = (input) =>
        this.attend("cross", number, layer.cross, stack.heads, input, n, source, options, kept?.cross);
      x = this.around(x, n, layer.crossNorm, cross, options, kept?.cross);
      const feed = (input) => this.feedForward(layer, input, n, kept?.feed);
      x = this.around(x, n, layer.lastNorm, feed, options, kept?.feed);
    });
    return this.end(stack, x, n);
  }

  /** Decodes a target as far as it is known, ids (T,): the output of each position, (T, d_model). */
  decode(ids, memory, options, record = null) {
    const visible = (_, keys, values) => (row) => ({ keys, values, count: options.causal ? row + 1 : ids.length });
    return this.decodeRows(ids, ids.map((_, place) => place), memory, visible, options, record);
  }

  /** Section 3.4: the logits of n rows, a Float32Array of V each. */
  logits(x, n) {
    return rowsOf(linear(x, n, this.projection), n);
  }
}

/** The numbers in between of one pass of a stack, by tokens and by layers. */
export class Record {
  constructor() {
    this.embedded = [];
    this.layers = [];
  }

  layer(number) {
    return (this.layers[number] = { self: {}, cross: {}, feed: {} });
  }
}

/** Decodes hypotheses step by step; rows are hypotheses. Keys and values of earlier positions are kept. */
export class Decoding {
  constructor(model, memory, options) {
    Object.assign(this, { model, memory, options, tokens: [[]] });
    this.past = [model.decoder.layers.map(() => ({ keys: [], values: [] }))];
  }

  /** Advances by one position, with the token of each row; returns the logits of each. */
  step(tokens) {
    const { model, memory, options } = this, place = this.tokens[0].length;
    this.tokens.forEach((row, number) => row.push(tokens[number]));
    if (!options.causal) {  // what later positions change, can't be kept
      return this.tokens.map((row) => {
        const hidden = model.decode(row, memory, options), d = model.config.d_model;
        return model.logits(hidden.subarray(-d), 1)[0];
      });
    }
    const visible = (layer, keys, values) => (row) => {
      const own = this.past[row][layer];
      if (own.keys.length === place) {
        own.keys.push(keys[row]);
        own.values.push(values[row]);
      }
      return { keys: own.keys, values: own.values, count: place + 1 };
    };
    const hidden = model.decodeRows(tokens, tokens.map(() => place), memory, visible, options, null);
    return model.logits(hidden, tokens.length);
  }

  /** Gives each row the past of a former row. */
  move(rows) {
    this.tokens = rows.map((row) => [...this.tokens[row]]);
    this.past = rows.map((row) => this.past[row].map(({ keys, values }) => ({ keys: [...keys], values: [...values] })));
  }
}
