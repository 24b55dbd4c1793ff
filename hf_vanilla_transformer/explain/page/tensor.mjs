// Matrices as Float32Array, row by row; sums are in float64. n: rows, d and m: widths.

/** Returns x W^T + b, (n, m), of x, (n, d), W, (m, d), and b, (m,) or null. */
export function linear(x, n, { weight, bias }) {
  const d = x.length / n, m = weight.length / d, y = new Float32Array(n * m), whole = m - (m % 4), even = n - (n % 2);
  for (let j = 0; j < whole; j += 4) {
    for (let i = 0; i < even; i += 2) twoByFour(x, i * d, weight, j * d, d, y, i * m + j, m);
    if (even < n) oneByFour(x, even * d, weight, j * d, d, y, even * m + j);
  }
  for (let j = whole; j < m; j++) for (let i = 0; i < n; i++) y[i * m + j] = dot(x, i * d, weight, j * d, d);
  if (bias) for (let place = 0; place < y.length; place++) y[place] += bias[place % m];
  return y;
}

/** Two rows of x by four of W: each number that is read serves several products. */
function twoByFour(x, i0, w, j0, d, y, place, m) {
  const i1 = i0 + d, j1 = j0 + d, j2 = j1 + d, j3 = j2 + d;
  let a0 = 0, a1 = 0, a2 = 0, a3 = 0, b0 = 0, b1 = 0, b2 = 0, b3 = 0;
  for (let c = 0; c < d; c++) {
    const a = x[i0 + c], b = x[i1 + c], w0 = w[j0 + c], w1 = w[j1 + c], w2 = w[j2 + c], w3 = w[j3 + c];
    a0 += a * w0; a1 += a * w1; a2 += a * w2; a3 += a * w3;
    b0 += b * w0; b1 += b * w1; b2 += b * w2; b3 += b * w3;
  }
  y[place] = a0; y[place + 1] = a1; y[place + 2] = a2; y[place + 3] = a3;
  y[place + m] = b0; y[place + m + 1] = b1; y[place + m + 2] = b2; y[place + m + 3] = b3;
}

function oneByFour(x, i0, w, j0, d, y, place) {
  const j1 = j0 + d, j2 = j1 + d, j3 = j2 + d;
  let a0 = 0, a1 = 0, a2 = 0, a3 = 0;
  for (let c = 0; c < d; c++) {
    const a = x[i0 + c];
    a0 += a * w[j0 + c]; a1 += a * w[j1 + c]; a2 += a * w[j2 + c]; a3 += a * w[j3 + c];
  }
  y[place] = a0; y[place + 1] = a1; y[place + 2] = a2; y[place + 3] = a3;
}

/** Returns the product of d numbers of a, from `i` on, with d of b, from `j` on. */
export function dot(a, i, b, j, d) {
  let sum = 0;
  for (let c = 0; c < d; c++) sum += a[i + c] * b[j + c];
  return sum;
}

export function add(a, b) {
  return a.map((value, place) => value + b[place]);
}

/** Returns the n rows of x, (n, d), as views. */
export function rowsOf(x, n) {
  const d = x.length / n;
  return Array.from({ length: n }, (_, row) => x.subarray(row * d, (row + 1) * d));
}

/** Mean and standard deviation of a row. */
export function moments(row) {
  let sum = 0, squares = 0;
  for (const value of row) sum += value;
  const mean = sum / row.length;
  for (const value of row) squares += (value - mean) ** 2;
  return { mean, deviation: Math.sqrt(squares / row.length) };
}

/** LayerNorm of each row of x, (n, d), with a gain and a bias, (d,). */
export function layerNorm(x, n, { weight, bias }, epsilon) {
  const y = new Float32Array(x.length), d = x.length / n;
  rowsOf(x, n).forEach((row, number) => {
    const { mean, deviation } = moments(row), by = 1 / Math.sqrt(deviation ** 2 + epsilon);
    for (let c = 0; c < d; c++) y[number * d + c] = (row[c] - mean) * by * weight[c] + bias[c];
  });
  return y;
}

/** Softmax of some numbers, in place of them. */
export function softmax(scores) {
  const largest = scores.reduce((a, b) => Math.max(a, b), -Infinity);
  let sum = 0;
  for (let i = 0; i < scores.length; i++) sum += scores[i] = Math.exp(scores[i] - largest);
  for (let i = 0; i < scores.length; i++) scores[i] /= sum;
  return scores;
}

/** Natural logarithms of the probabilities that logits stand for. */
export function logSoftmax(logits) {
  const largest = logits.reduce((a, b) => Math.max(a, b), -Infinity);
  let sum = 0;
  for (const logit of logits) sum += Math.exp(logit - largest);
  const by = largest + Math.log(sum);
  return logits.map((logit) => logit - by);
}

/** Indices of the largest values, the largest first. */
export function largest(values, count) {
  const best = [];
  for (let index = 0; index < values.length; index++) {
    if (best.length === count && values[index] <= values[best[count - 1]]) continue;
    let place = best.length;
    while (place > 0 && values[best[place - 1]] < values[index]) place--;
    best.splice(place, 0, index);
    if (best.length > count) best.pop();
  }
  return best;
}

/** The error function, by a series whose terms all have one sign. */
function erf(x) {
  if (Math.abs(x) > 6) return Math.sign(x);
  let term = x, sum = x;
  for (let n = 1; Math.abs(term) > 1e-17; n++) sum += term *= (2 * x * x) / (2 * n + 1);
  return (2 / Math.sqrt(Math.PI)) * Math.exp(-x * x) * sum;
}

const gelu = (x) => 0.5 * x * (1 + erf(x / Math.SQRT2));
const tanhGelu = (x) => 0.5 * x * (1 + Math.tanh(Math.sqrt(2 / Math.PI) * (x + 0.044715 * x ** 3)));
const sigmoid = (x) => 1 / (1 + Math.exp(-x));
const silu = (x) => x * sigmoid(x), quickGelu = (x) => x * sigmoid(1.702 * x);
/** By the names that configurations have for them. */
export const ACTIVATIONS = {
  relu: (x) => Math.max(0, x), tanh: Math.tanh,
  gelu, gelu_new: tanhGelu, gelu_pytorch_tanh: tanhGelu, quick_gelu: quickGelu, silu, swish: silu,
  sigmoid,
};
