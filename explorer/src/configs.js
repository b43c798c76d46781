// What can be said of a config.json without Python: its spelling is looked up in a table of what
// posenc's emulators of six runtimes answered (runtimes.py); what is not in the table is not guessed.

import data from "./data.json";
import { longropeScale, plain, scaled, yarnFrequencies, yarnScale } from "./formulas.js";
import { differing, familyOf, findings, missing, sameRotation, unjudged } from "./rules.js";
import { nearest } from "./similar.js";

const table = data.runtimes;
export const RUNTIMES = table.runtimes;
const LONGEST = 1e6;
const LARGEST_HEAD = 512;
const INNER = ["text_config", "language_config", "llm_config"];
const TYPES = ["default", "linear", "dynamic", "yarn", "llama3", "longrope"];
const ORIGINAL = "original_max_position_embeddings";
const HANDLED = new Set([
  "model_type", "architectures", "head_dim", "rope_theta", "rope_scaling", "rope_parameters", ORIGINAL,
  "max_position_embeddings", "hidden_size", "num_attention_heads", "num_hidden_layers",
]);
const IN_ROPE = new Set([
  "rope_type", "type", "rope_theta", ORIGINAL, "factor", "low_freq_factor", "high_freq_factor",
  "short_factor", "long_factor",
]);
const read = new Set(table.read);
const known = new Set(table.known);
const unrotated = new Set(table.unrotated);
const places = new Map(table.spellings.map((spelling, i) => [spelling, i]));

const isObject = (x) => typeof x === "object" && x !== null && !Array.isArray(x);
const isNumber = (x) => typeof x === "number" && Number.isFinite(x);
const isSize = (x) => Number.isInteger(x) && x >= 1 && x < 2 ** 40;

// A config, or the sentence that says why there is none: {problem, values}.
export function parse(text) {
  if (!text.trim()) return { problem: "config.empty" };
  if (text.length > LONGEST)
    return { problem: "config.long", values: { size: (text.length / 1e6).toFixed(1) } };
  let config;
  try {
    config = JSON.parse(text);
  } catch {
    return { problem: "config.nojson" };
  }
  if (!isObject(config)) return { problem: "config.noobject" };
  if (INNER.some((key) => isObject(config[key]))) return { problem: "config.several" };
  const family = config.model_type;
  if (typeof family !== "string" || !family) return { problem: "config.nofamily" };
  const values = { family: family.length > 60 ? `${family.slice(0, 60)}…` : family };
  if (unrotated.has(family)) return { problem: "config.nothing", values };
  if (!known.has(family)) {
    const meant = nearest(family, table.known, 0.75);
    return meant ? { problem: "config.meant", values: { ...values, meant } } : { problem: "config.unknown", values };
  }
  return { config, family };
}

// True if a key that emulators read changes no answer with this value, as tried for this family.
function harmless(key, value, facts) {
  if (!facts.harmless.includes(key)) return false;
  if (key === "rope.beta_fast") return value === 32;
  if (key === "rope.beta_slow") return value === 1;
  if (key === "hidden_act") return typeof value === "string";
  if (key === "use_sliding_window") return value === false;
  if (key === "use_qk_norm") return typeof value === "boolean";
  if (key === "layer_types") return Array.isArray(value) && value.every((kind) => kind === "full_attention");
  if (key === "rope_scaling" || key === "head_dim") return value === null;
  if (key === "sliding_window") return value === null || isSize(value);
  return value !== null && (typeof value === "boolean" || isNumber(value));
}

// The first size that is written as 4096.0 or 4e3: some runtimes refuse it, and what JavaScript reads
// does not show it.
function fractional(text) {
  const sizes = ["hidden_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers", "head_dim", "max_position_embeddings", "intermediate_size", "vocab_size", "sliding_window", ORIGINAL];
  return text.match(new RegExp(`"(${sizes.join("|")})"\\s*:\\s*-?\\d+[.eE]`))?.[1];
}

// The spelling of a config and its numbers, or the key that the table says nothing of.
export function spelled(config, facts) {
  const stop = (key) => ({ stop: key });
  for (const [key, value] of Object.entries(config))
    if (!HANDLED.has(key) && read.has(key) && !harmless(key, value, facts)) return stop(key);
  const names = config.architectures;
  if (names !== undefined && !(Array.isArray(names) && names.length === 1 && names[0] === facts.architecture))
    return stop("architectures");
  for (const key of ["hidden_size", "num_attention_heads", "num_hidden_layers", "max_position_embeddings"])
    if (!isSize(config[key])) return stop(key);
  const { hidden_size: hidden, num_attention_heads: heads, max_position_embeddings: max } = config;
  const even = hidden / heads;
  if (!isSize(even)) return stop("hidden_size");
  let head = config.head_dim;
  if (head === null && harmless("head_dim", null, facts)) head = undefined;
  for (const size of head === undefined ? [even] : [head])
    if (!isSize(size) || size % 2 || size > LARGEST_HEAD) return stop("head_dim");
  if (max < 1025) return stop("max_position_embeddings");
  for (const key of ["rope_scaling", "rope_parameters"])
    if (config[key] === null && !harmless(key, null, facts)) return stop(key);
  const given = ["rope_scaling", "rope_parameters"].filter((key) => config[key] !== undefined && config[key] !== null);
  for (const key of given) if (!isObject(config[key])) return stop(key);
  const twice = given.length > 1;
  const container = twice ? "both" : (given[0] ?? "none");
  const rope = given.length ? config[given[0]] : {};
  if (twice) {
    const fresh = config.rope_parameters;
    if (differing(rope, fresh, config).length || fresh.rope_type === undefined || "type" in fresh) return stop("rope_parameters");
    if (rope.rope_theta !== undefined && (fresh.rope_theta === undefined || config.rope_theta === undefined)) return stop("rope_theta");
  }
  for (const [key, value] of Object.entries(rope))
    if (!IN_ROPE.has(key) && !harmless(`rope.${key}`, value, facts)) return stop(key);
  const types = ["rope_type", "type"].filter((key) => rope[key] !== undefined);
  const kind = given.length ? rope[types[0]] : "default";
  if (given.length && (!types.length || !TYPES.includes(kind) || types.some((key) => rope[key] !== kind)))
    return stop("rope_type");
  const outer = config.rope_theta, inner = twice ? config.rope_parameters.rope_theta : rope.rope_theta;
  for (const theta of [outer, inner])
    if (theta !== undefined && !(isNumber(theta) && theta > 1)) return stop("rope_theta");
  if (rope[ORIGINAL] !== undefined && config[ORIGINAL] !== undefined) return stop(ORIGINAL);
  const original = rope[ORIGINAL] ?? config[ORIGINAL];
  if (original !== undefined && !(isSize(original) && (kind === "longrope" ? original < max : original <= max)))
    return stop(ORIGINAL);
  const factor = rope.factor;
  if (factor !== undefined && !(isNumber(factor) && factor >= 1)) return stop("factor");
  const low = rope.low_freq_factor, high = rope.high_freq_factor;
  if (kind === "llama3" ? !(isNumber(low) && isNumber(high) && 0 < low && low < high) : low !== undefined || high !== undefined)
    return stop("low_freq_factor");
  const lists = [rope.short_factor, rope.long_factor];
  const good = (list) => Array.isArray(list) && list.length === (head ?? even) / 2 && list.every((x) => isNumber(x) && x > 0);
  if (kind === "longrope" ? !lists.every(good) : lists.some((list) => list !== undefined)) return stop("long_factor");
  const where = (a, b) => (a !== undefined ? (b !== undefined ? "both" : "outer") : b !== undefined ? "inner" : "none");
  const spelling = [
    container, types.length === 2 ? "both" : (types[0] ?? ""), kind,
    twice && rope.rope_theta !== undefined ? "all" : where(outer, inner),
    where(config[ORIGINAL], rope[ORIGINAL]), factor === undefined ? "0" : "1", head === undefined ? "0" : "1",
  ].join(" ");
  return {
    spelling, kind, max, even, head: head ?? even, outer, inner, original, factor, low, high,
    short: lists[0], long: lists[1],
  };
}

// The numbers of an answer of the table, for the numbers of a config; null where they do not fit.
function computed(answer, v) {
  const size = answer.dim === "own" ? v.head : answer.dim === "even" ? v.even : answer.dim;
  const dim = Math.trunc(size * answer.share);
  if (dim % 2 || dim < 4) return null;
  const base = answer.theta === "outer" ? v.outer : answer.theta === "inner" ? v.inner : answer.theta;
  const at = (place) => (place === "max" ? v.max : typeof place === "number" ? place : v.original);
  const original = answer.original === undefined ? null : at(answer.original);
  const factor = v.factor;
  const list = (factors) => (factors.length === dim / 2 ? plain(dim, base).map((f, i) => f / factors[i]) : null);
  const freq = {
    default: () => plain(dim, base),
    linear: () => plain(dim, base).map((f) => f / factor),
    ntk: () => scaled("ntk", { dim, base, factor }).freq,
    dynamic: () => scaled("dynamic", { dim, base, factor, original, length: v.max * factor }).freq,
    yarn: () => yarnFrequencies(dim, base, factor, original),
    llama3: () => scaled("llama3", { dim, base, factor, original, low: v.low, high: v.high }).freq,
    short: () => list(v.short),
    long: () => list(v.long),
  }[answer.type]();
  if (!freq) return null;
  const [name, ratio, place] = answer.scale.split(" ");
  const trained = place && at(place);
  const scale = { 1: () => 1, yarn: () => yarnScale(factor), longrope: () => longropeScale(ratio === "max" ? v.max / trained : factor, trained) }[name]();
  const limit = { none: null, max: v.max, stretched: Math.trunc(v.max * factor) }[answer.limit];
  return { ...answer, base, original, freq, scale, limit };
}

// runtime -> {a: "computes" | "refuses" | "no model" | "unknown" | "doctor", ...}, with what the
// rules find, the missing keys, and `stop`, the key that the page cannot judge; or a problem.
export function answers(text) {
  const found = parse(text);
  if (found.problem) return found;
  const { config, family } = found;
  const facts = Object.hasOwn(table.families, family) ? table.families[family] : null;
  const odd = fractional(text);
  const values = odd ? { stop: odd } : facts ? spelled(config, facts) : { stop: "model_type" };
  const place = values.spelling === undefined ? undefined : places.get(values.spelling);
  const needed = (facts?.needs ?? []).filter((key) => config[key] === undefined);
  const runtimes = {};
  Object.keys(RUNTIMES).forEach((runtime, i) => {
    const lacking = runtime === "mlx-lm" && needed.length;
    const answer = place === undefined || lacking ? null : table.answers[parseInt(table.columns[facts.columns[i]].slice(2 * place, 2 * place + 2), 36)];
    const full = answer?.a === "computes" ? computed(answer, values) : answer;
    runtimes[runtime] = full ?? { a: "doctor" };
  });
  const judged = familyOf(family);
  const ruled = judged ? findings(config, judged, runtimes) : { found: [], stop: "model_type" };
  const lacks = judged ? missing(config, judged) : [];
  const stops = [
    ruled.stop, lacks.includes(values.stop) ? null : values.stop, judged && unjudged(config),
    place === undefined && !values.stop ? "rope_type" : null,
    ["dynamic", "longrope"].includes(values.kind) ? `rope_type ${values.kind}` : null,
    Object.values(runtimes).some(({ a }) => ["computes", "refuses", "doctor"].includes(a)) ? null : "model_type",
  ];
  return { family, values, runtimes, findings: ruled.found, missing: [...new Set([...lacks, ...needed])], stop: stops.find(Boolean) ?? null };
}

// Letters for different rotations: the same letter, the same numbers.
export function letters(runtimes) {
  const groups = [];
  const found = {};
  for (const [name, answer] of Object.entries(runtimes)) {
    if (answer.a !== "computes") continue;
    let at = groups.findIndex((other) => sameRotation(answer, other));
    if (at < 0) at = groups.push(answer) - 1;
    found[name] = String.fromCharCode(65 + at);
  }
  return { found, count: groups.length };
}

// True if the page knows all that the doctor would say of a config, and it is nothing.
export const isClear = (found) =>
  Boolean(found.runtimes) && !found.stop && !found.missing.length && found.findings.every(({ rank }) => rank > 1) &&
  letters(found.runtimes).count === 1 && Object.values(found.runtimes).every(({ a }) => !["refuses", "doctor"].includes(a));

// Those numbers of a config that fit the panels; null for what is no config.
export function numbersOf(text) {
  let config;
  try {
    config = JSON.parse(text.length > LONGEST ? "" : text);
  } catch {
    return null;
  }
  if (!isObject(config)) return null;
  for (const key of INNER) if (isObject(config[key])) config = { ...config, ...config[key] };
  if (!known.has(config.model_type) || unrotated.has(config.model_type)) return null;
  const rope = [config.rope_scaling, config.rope_parameters].find(isObject) ?? {};
  const original = rope[ORIGINAL] ?? config[ORIGINAL];
  const numbers = {
    base: rope.rope_theta ?? config.rope_parameters?.rope_theta ?? config.rope_theta ?? 10000,
    dim: config.head_dim ?? config.hidden_size / config.num_attention_heads,
    original: original ?? config.max_position_embeddings,
    factor: rope.factor ?? (isSize(original) ? config.max_position_embeddings / original : 1),
  };
  const fits = {
    base: (x) => x >= 100 && x <= 1e9, dim: (x) => x % 2 === 0 && x >= 8 && x <= LARGEST_HEAD,
    original: (x) => isSize(x) && x >= 64 && x <= 2 ** 20, factor: (x) => x >= 1 && x <= 128,
  };
  const fitting = Object.entries(numbers).filter(([key, x]) => isNumber(x) && fits[key](x));
  if (!fitting.length) return null;
  const type = rope.rope_type ?? rope.type;
  const names = { default: "none", linear: "linear", dynamic: "dynamic", yarn: "yarn", llama3: "llama3", longrope: "longrope", su: "longrope" };
  const factors = Array.isArray(rope.long_factor) && rope.long_factor.every((x) => isNumber(x) && x > 0) ? rope.long_factor : null;
  return { ...Object.fromEntries(fitting), scaling: Object.hasOwn(names, type) ? names[type] : "none", factors };
}
