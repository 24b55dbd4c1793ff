// Section 6.1: greedy and beam search, as the package's engine/decoding/search.py has them, for one sentence.
import { largest, logSoftmax } from "./tensor.mjs";

/** What the log-probability of a hypothesis is divided by; its length counts the end of sentence. */
export function divisor(plan, length) {
  return plan.is_gnmt ? ((5 + length) / 6) ** plan.length_penalty : length ** plan.length_penalty;
}

/** The most tokens that a translation of S source tokens has. */
export function limitOf(plan, config, sourceLength) {
  const [name, value] = plan.limit, extra = name === "max_extra_length";
  const limit = Math.max(extra ? value + sourceLength : name === "max_length" ? value - 1 : value, 1);
  const isLearned = extra && config.position_encoding === "learned";
  return isLearned ? Math.min(limit, Math.max(config.max_position_embeddings - 1, 1)) : limit;
}

/** Searches by the plan. Returns hypotheses, the best first, {tokens, score}; and the steps of a beam search. */
export function search(decoding, plan, limit) {
  if (plan.num_beams > 1) return beamSearch(decoding, plan, limit);
  return { found: [greedySearch(decoding, plan, limit)], steps: [] };
}

/** Log-probabilities of the next token as the plan allows them; at the limit, one of some ends may be forced. */
function allowed(plan, logits, isLast) {
  const logs = logSoftmax(logits);
  for (const token of plan.barred) logs[token] = -Infinity;
  if (isLast && plan.forced_end.length) {
    logs.fill(-Infinity);
    for (const token of plan.forced_end) logs[token] = 0;
  }
  return plan.renormalize ? logSoftmax(logs) : logs;
}

/** Takes the most probable token at each step: {tokens, total, score: null}. */
export function greedySearch(decoding, plan, limit) {
  const tokens = [];
  let token = plan.start, total = 0;
  while (tokens.length < limit && !plan.ends.includes(tokens.at(-1))) {
    const logs = allowed(plan, decoding.step([token])[0], tokens.length + 1 === limit);
    [token] = largest(logs, 1);
    total += logs[token];
    tokens.push(token);
  }
  return { tokens, total, score: null };
}

/**
 * A step has the best continuations of its beams, {parent, token, total, state}: `parent` is the node that it
 * continues, `state` is "kept", "finished" or "dropped"; and the K best finished hypotheses after it,
 * {node, length, score}.
 */
function beamSearch(decoding, plan, limit) {
  const K = plan.num_beams, width = Math.max(2, 1 + plan.ends.length) * K, steps = [];
  let beams = [{ parent: null, token: plan.start, total: 0 }], finished = [];
  for (let length = 1; length <= limit && beams.length; length++) {
    const logits = decoding.step(beams.map((beam) => beam.token));
    const nodes = continuations(logits.map((row) => allowed(plan, row, length === limit)), beams, width);
    const by = divisor(plan, length), parents = beams;
    nodes.forEach((node, rank) => {
      const ends = length === limit || plan.ends.includes(node.token);
      node.state = !ends ? "open" : rank < K ? "finished" : "dropped";
      if (node.state === "finished") finished.push({ node, length, score: Math.fround(node.total / by) });
    });
    finished = finished.sort((a, b) => b.score - a.score).slice(0, K);  // the sort is stable: the first comes first
    beams = nodes.filter((node) => node.state === "open").slice(0, K);
    for (const node of nodes) if (node.state === "open") node.state = beams.includes(node) ? "kept" : "dropped";
    steps.push({ nodes, finished, length, by });
    if (!goesOn(plan, beams, finished, by, limit)) break;
    decoding.move(beams.map((beam) => parents.indexOf(beam.parent)));
  }
  return { found: finished.map(({ node, score }) => ({ tokens: path(node), score, total: node.total, node })), steps };
}

function continuations(logs, beams, width) {
  const best = [];
  beams.forEach((parent, row) => {
    const totals = logs[row].map((value) => value + parent.total);
    for (const token of largest(totals, width)) best.push({ parent, token, total: totals[token] });
  });
  return best.filter(({ total }) => total > -Infinity).sort((a, b) => b.total - a.total).slice(0, width);
}

function goesOn(plan, beams, finished, by, limit) {
  if (!beams.length) return false;
  const isFull = finished.length === plan.num_beams;
  if (plan.early_stopping === true) return !isFull;
  // More tokens only lower the log-probability; but a higher length divides by more.
  const most = plan.early_stopping === "never" && plan.length_penalty > 0 ? divisor(plan, limit) : by;
  return !isFull || beams[0].total / most > finished.at(-1).score;
}

/** The tokens from the first to a node's. */
export function path(node) {
  const tokens = [];
  for (let one = node; one.parent; one = one.parent) tokens.unshift(one.token);
  return tokens;
}
