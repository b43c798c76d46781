// Formulas of posenc, each checked against posenc by tests/explore/test_page.py.
// Frequencies are in radians per position, fastest pair first.

export const TURN = 2 * Math.PI;
const range = (n) => Array.from({ length: n }, (_, i) => i);
const clip = (x, low, high) => Math.min(Math.max(x, low), high);

export const plain = (dim, base) => range(dim / 2).map((i) => base ** ((-2 * i) / dim));

const ntk = (dim, base, factor) => plain(dim, base * factor ** (dim / (dim - 2)));

function byParts(dim, base, factor, original, alpha, beta) {
  return plain(dim, base).map((f) => {
    const kept = clip(((original * f) / TURN - alpha) / (beta - alpha), 0, 1);
    return (f / factor) * (1 - kept) + f * kept;
  });
}

export function yarnFrequencies(dim, base, factor, original, fast = 32, slow = 1) {
  const pair = (turns) => (dim * Math.log(original / (turns * TURN))) / (2 * Math.log(base));
  const low = Math.max(Math.floor(pair(fast)), 0);
  const high = Math.min(Math.ceil(pair(slow)), dim - 1);
  const width = high - low || 0.001;
  return plain(dim, base).map((f, i) => {
    const share = clip((i - low) / width, 0, 1);
    return (f / factor) * share + f * (1 - share);
  });
}

export const yarnScale = (factor) => (factor > 1 ? 0.1 * Math.log(factor) + 1 : 1);

export const longropeScale = (ratio, original) =>
  ratio > 1 ? Math.sqrt(1 + Math.log(ratio) / Math.log(original)) : 1;

export const SCALINGS = ["none", "linear", "ntk", "dynamic", "byparts", "yarn", "llama3", "longrope"];

// name -> {freq, scale}: the frequencies, and the multiplier of cos and sin. `longrope` is null
// without one factor a pair.
export function scaled(name, { dim, base, factor, original, longrope = null, length = null, low = 1, high = 4 }) {
  const target = length ?? original * factor;
  switch (name) {
    case "none":
      return { freq: plain(dim, base), scale: 1 };
    case "linear":
      return { freq: plain(dim, base).map((f) => f / factor), scale: 1 };
    case "ntk":
      return { freq: ntk(dim, base, factor), scale: 1 };
    case "dynamic": {
      const stretch = (factor * Math.max(target, original)) / original - (factor - 1);
      return { freq: ntk(dim, base, stretch), scale: 1 };
    }
    case "byparts":
      return { freq: byParts(dim, base, factor, original, 1, 32), scale: 1 };
    case "yarn":
      return { freq: yarnFrequencies(dim, base, factor, original), scale: yarnScale(factor) };
    case "llama3":
      return { freq: byParts(dim, base, factor, original, low, high), scale: 1 };
    case "longrope": {
      if (!longrope || longrope.length !== dim / 2) return null;
      const freq = plain(dim, base).map((f, i) => f / longrope[i]);
      return { freq, scale: longropeScale(factor, original) };
    }
  }
  throw new Error(name);
}

// What training showed of each pair's angles up to the target length: "whole" turns, so that every
// angle is known; "inside", no whole turn, but no new angle either; "beyond", new angles.
export function trained(freq, { dim, base, factor, original }) {
  return plain(dim, base).map((f, i) => {
    if (original * f >= TURN) return "whole";
    return freq[i] * original * factor <= f * original * (1 + 1e-9) ? "inside" : "beyond";
  });
}

// The score of a vector with itself at a distance, as a share of that at distance 0, where every pair
// has the same length.
export const sameScore = (freq, distance) =>
  freq.reduce((sum, f) => sum + Math.cos(distance * f), 0) / freq.length;

export function slopes(heads) {
  const power = 2 ** Math.floor(Math.log2(heads));
  const own = range(power).map((h) => 2 ** ((-8 * (h + 1)) / power));
  const between = range(power).map((h) => 2 ** ((-8 * (2 * h + 1)) / (2 * power)));
  return [...own, ...between.slice(0, heads - power)];
}

// The first distance of buckets 1, 2, ... on one side; in whole numbers, so that distances on an
// edge are exact.
export function bucketEdges(buckets, furthest) {
  const exact = Math.floor(buckets / 2);
  const steps = buckets - exact;
  const edges = range(exact).map((i) => i + 1);
  let x = exact;
  for (let step = 1; step < steps; step++) {
    const power = (base, exponent) => BigInt(base) ** BigInt(exponent);
    const right = power(furthest, step) * power(exact, steps);
    while (power(x, steps) * power(exact, step) < right) x++;
    edges.push(x);
  }
  return edges;
}

// The input of FIRE's network for a distance and a query at `position`.
export function fireShare(distance, position, c, threshold) {
  const log = (x) => Math.log1p(Math.abs(c * x));
  return log(distance) / (log(Math.max(position, threshold)) + 1e-6);
}

export const visible = {
  causal: (q, k) => k <= q,
  window: (q, k, { window }) => Math.abs(q - k) < window,
  prefix: (q, k, { prefix }) => k < prefix,
  document: (q, k, { documents }) => documents[q] === documents[k],
};

// (causal | prefix(n)) & sliding_window(w) & document(ids), of what is switched on.
export function sees(q, k, mask) {
  const open = !mask.causal || visible.causal(q, k) || (mask.prefix > 0 && visible.prefix(q, k, mask));
  return (
    open &&
    (!mask.window || visible.window(q, k, mask)) &&
    (!mask.documents || visible.document(q, k, mask))
  );
}

const bits = new DataView(new ArrayBuffer(8));

// Round to a binary float with `fraction` bits after the point, to even where two are as near.
function rounded(x, fraction, least, largest) {
  if (x === 0 || !Number.isFinite(x)) return x;
  bits.setFloat64(0, Math.abs(x));
  const exponent = Math.max(((bits.getUint32(0) >>> 20) & 0x7ff) - 1023, least);
  const unit = 2 ** (exponent - fraction);
  const units = Math.abs(x) / unit;
  const below = Math.floor(units);
  const rest = units - below;
  const up = rest > 0.5 || (rest === 0.5 && below % 2 === 1);
  const result = (up ? below + 1 : below) * unit;
  return Math.sign(x) * (result > largest ? Infinity : result);
}

export const DTYPES = {
  bfloat16: (x) => rounded(Math.fround(x), 7, -126, 3.3895313892515355e38),
  float16: (x) => rounded(Math.fround(x), 10, -14, 65504),
  float32: Math.fround,
};

// The largest error over all pairs of position times frequency, both and the product rounded, on
// the circle; null where the format has no such number.
export function angleError(position, freq, dtype) {
  const round = DTYPES[dtype];
  let most = 0;
  for (const f of freq) {
    const gap = Math.abs(round(round(position) * round(f)) - position * f) % TURN;
    if (Number.isNaN(gap)) return null;
    most = Math.max(most, Math.min(gap, TURN - gap));
  }
  return most;
}

export const WORD_DIM = 16;

// A fixed vector for each word, the same at every place: sixteen numbers between -1 and 1.
export function wordVector(word) {
  let seed = 2166136261;
  for (const letter of word) seed = Math.imul(seed ^ letter.codePointAt(0), 16777619) >>> 0;
  return range(WORD_DIM).map(() => {
    seed = (Math.imul(seed, 1664525) + 1013904223) >>> 0;
    return (2 * seed) / 2 ** 32 - 1;
  });
}

// Attention weights of vectors that are queries and keys at once, a row for each query; no mask.
// positions: "nope", "rope" with base 10,000, or "alibi" as the first of eight heads has it.
export function attentionWeights(vectors, positions) {
  const turned = positions === "rope" ? vectors.map((x, p) => rotated(x, p)) : vectors;
  const slope = positions === "alibi" ? slopes(8)[0] : 0;
  return turned.map((q, i) => {
    const scores = turned.map((k, j) => {
      const dot = q.reduce((sum, x, c) => sum + x * k[c], 0);
      return dot / Math.sqrt(WORD_DIM) - slope * Math.abs(i - j);
    });
    const highest = Math.max(...scores);
    const powers = scores.map((score) => Math.exp(score - highest));
    const total = powers.reduce((sum, x) => sum + x, 0);
    return powers.map((x) => x / total);
  });
}

// Pairs are (t, t + dim/2).
function rotated(x, position) {
  const half = x.length / 2;
  const angles = plain(x.length, 10000).map((freq) => position * freq);
  const first = angles.map((a, t) => x[t] * Math.cos(a) - x[t + half] * Math.sin(a));
  const second = angles.map((a, t) => x[t + half] * Math.cos(a) + x[t] * Math.sin(a));
  return [...first, ...second];
}
