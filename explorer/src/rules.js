// The doctor's rules that need no runtime, with its codes and its words; what they cannot judge is
// left to it. tests/explore/test_page.py holds each finding to posenc.doctor.

import data from "./data.json";
import { nearest } from "./similar.js";

const facts = data.rules;
const ORIGINAL = "original_max_position_embeddings";
const MAX = "max_position_embeddings";
const SIZES = ["hidden_size", "num_attention_heads", "num_hidden_layers", MAX];
const STRETCHED = ["yarn", "longrope", "llama3"];
const OTHER_NAMES = new Set([...facts.lengths, "n_layer", "n_layers", "num_layers", "n_head", "n_heads", "n_embd", "d_model"]);
const DICTS = ["rope_scaling", "rope_parameters"];
const LOOKED_AT = new Set([
  ...SIZES, ...DICTS, ORIGINAL, "model_type", "architectures", "head_dim", "rope_theta", "num_key_value_heads",
  "layer_types",
]);

const isObject = (x) => typeof x === "object" && x !== null && !Array.isArray(x);
const isNumber = (x) => typeof x === "number" && Number.isFinite(x);
const isSize = (x) => Number.isInteger(x) && x >= 1 && x < 2 ** 40;
const given = (x) => x !== undefined && x !== null;
const near = (a, b, tolerance) => Math.abs(a - b) <= tolerance * Math.max(Math.abs(a), Math.abs(b));

// A number as Python's :g writes it: six digits, to the even one of two that are as near.
export function short(x) {
  const all = x.toExponential(60);
  const tie = /^-?\d\.\d{4}[02468]50*e/.test(all);
  const [digits, exponent] = (tie ? all.replace(/50*e/, "e") : x.toExponential(5)).split("e").map(Number);
  if (exponent >= -4 && exponent < 6) return String(Number(`${digits}e${exponent}`));
  return `${digits}e${exponent < 0 ? "-" : "+"}${String(Math.abs(exponent)).padStart(2, "0")}`;
}

// A value as posenc.runtimes.files.json_object.in_json_words writes it, but for numbers, of which
// JSON.parse keeps no point.
export function repr(x) {
  if (typeof x === "string") {
    const quote = x.includes("'") && !x.includes('"') ? '"' : "'";
    return quote + x.replaceAll("\\", "\\\\").replaceAll("\n", "\\n").replaceAll(quote, `\\${quote}`) + quote;
  }
  if (x === null || x === undefined) return "null";
  if (typeof x === "boolean") return String(x);
  if (Array.isArray(x)) return `[${x.map(repr).join(", ")}]`;
  if (isObject(x)) return `{${Object.entries(x).map(([k, v]) => `${repr(k)}: ${repr(v)}`).join(", ")}}`;
  return String(x);
}

export const familyOf = (name) => (Object.hasOwn(facts.families, name) ? facts.families[name] : null);

// The sizes that a config has under no name.
export function missing(config, family) {
  const other = Object.keys(config).some((key) => key !== MAX && (OTHER_NAMES.has(key) || family.names?.includes(key)));
  return other ? [] : SIZES.filter((key) => !given(config[key]));
}

// A key about positions, or of a rule, that no rule here looks at; null if there is none.
export function unjudged(config) {
  const words = new Set(facts.words);
  const positions = new RegExp(facts.positions);
  const base = new RegExp(`^(?:${facts.base})$`);
  for (const [key, value] of Object.entries(config)) {
    if (LOOKED_AT.has(key) || value === null) continue;
    if (words.has(key) || positions.test(key) || base.test(key.toLowerCase().replace(/[^a-z0-9]/g, ""))) return key;
    if (isObject(value) && "rope_theta" in value) return key;
  }
  return null;
}

const kindOf = (p) => {
  const kind = p.rope_type !== undefined ? p.rope_type : p.type;
  return given(kind) ? String(kind) : "default";
};

// The keys in which two rope dicts differ, after filling in types and the outer base.
export function differing(old, fresh, config) {
  const [a, b] = [old, fresh].map((dict) => {
    const { type, ...p } = dict;
    if (p.rope_type === undefined) p.rope_type = type ?? "default";
    p.rope_theta ??= config.rope_theta;
    return Object.fromEntries(Object.entries(p).filter(([, value]) => given(value)));
  });
  const keys = [...new Set([...Object.keys(a), ...Object.keys(b)])].sort();
  return keys.filter((key) => repr(a[key]) !== repr(b[key]));
}

// Keys that are almost one that is read: [place, key, the one that is read].
function slips(config, family, dicts) {
  const found = [];
  const targets = [...facts.targets, ...new Set([...(family.theta ?? ["rope_theta"]), ...(family.share ?? ["partial_rotary_factor"])].sort())];
  const skipped = new Set([...(family.keys ?? []), ...targets, ...facts.inner, ...DICTS]);
  for (const [key, value] of Object.entries(config)) {
    if (value === null || skipped.has(key)) continue;
    if (isObject(value)) {
      const keys = Object.keys(value);
      const scaling = keys.some((k) => facts.scalings.includes(k)) || ("factor" in value && "type" in value);
      if ((scaling || key.includes("yarn")) && !keys.some((k) => facts.tower.includes(k))) found.push(["", key, "rope_scaling"]);
      continue;
    }
    const meant = nearest(key, targets, 0.8);
    const part = key.endsWith(`_${meant}`) || key.startsWith(`${meant}_`);
    if (meant && !part && !given(config[meant])) found.push(["", key, meant]);
    else if (/^(rope_scaling_|rope_type$)/.test(key) && !dicts.length && ![1, true, "none", "default", false, 0].includes(value))
      found.push(["", key, "rope_scaling"]);
  }
  const known = new Set([...facts.common, ...facts.harmless, ...Object.values(facts.read).flat()]);
  for (const [place, p] of dicts) {
    const kind = kindOf(p);
    const read = [...new Set([...facts.common, ...(Object.hasOwn(facts.read, kind) ? facts.read[kind] : known)])].sort();
    for (const key of Object.keys(p)) {
      const meant = known.has(key) ? "" : nearest(key, read, 0.75);
      if (meant && !given(p[meant])) found.push([place, key, meant]);
    }
  }
  return found;
}

const OLD_READERS = ["transformers-4", "mlx-lm"];

// The findings of a config: {code, key, cure, values, rank}, misspelled keys and errors first, and `stop`, the key at which
// nothing more can be judged.
export function findings(config, family, runtimes) {
  const found = [];
  const dicts = DICTS.map((name) => [name, config[name]]).filter(([, p]) => isObject(p) && Object.keys(p).length);
  const odd = SIZES.find((key) => given(config[key]) && !isSize(config[key]));
  if (odd) return { found, stop: odd };
  for (const name of DICTS) if (given(config[name]) && !isObject(config[name])) return { found, stop: name };
  for (const [name, p] of dicts) if (Object.values(p).some(isObject)) return { found, stop: name };
  if (family.nested && dicts.length) return { found, stop: dicts[0][0] };
  const say = (rank, name, values = {}, cure = name.split(".")[0]) =>
    found.push({ rank, code: name.split(".")[0], key: `rule.${name}`, cure: `cure.${cure}`, values });
  const old = dicts.find(([name]) => name === "rope_scaling")?.[1];
  const fresh = dicts.find(([name]) => name === "rope_parameters")?.[1];
  const ofType = (...kinds) => dicts.filter(([name, p]) => kinds.includes(kindOf(p)) && !(old && name === "rope_parameters"));
  const largest = config[MAX];
  const originalOf = (p) => (p[ORIGINAL] === undefined ? config[ORIGINAL] : p[ORIGINAL]);
  const computes = (name) => (runtimes?.[name]?.a === "computes" ? runtimes[name] : null);

  if (fresh && !old) {
    const outer = "rope_theta" in config || "rotary_emb_base" in config;
    const lost = !outer && given(fresh.rope_theta) ? [isNumber(fresh.rope_theta) ? `rope_theta ${short(fresh.rope_theta)}` : "rope_theta"] : [];
    if (kindOf(fresh) !== "default") lost.push(kindOf(fresh));
    const readers = readersOf(runtimes);
    if (lost.length && readers) say(0, "PD001", { lost, readers });
    else if (lost.length) {
      const unread = OLD_READERS.filter((name) => runtimes?.[name]?.a === "unknown");
      const rest = OLD_READERS.filter((name) => !unread.includes(name));
      if (rest.some((name) => runtimes?.[name]?.a !== "no model")) say(0, "PD001.unknown", { lost });
      else if (unread.length) say(0, "PD001.unread", { lost, readers: unread });
    }
  }
  if (old && fresh) {
    const keys = differing(old, fresh, config);
    if (keys.length) say(0, "PD002", { pairs: keys.slice(0, 4).map((key) => ["rule.pair", { key, a: repr(old[key]), b: repr(fresh[key]) }]) });
  }
  const bases = dicts.filter(([, p]) => isNumber(p.rope_theta) && isNumber(config.rope_theta) && p.rope_theta !== config.rope_theta);
  for (const [name, p] of bases.slice(0, 1)) say(0, "PD003", { outer: short(config.rope_theta), inner: short(p.rope_theta), name });
  const anyBase = ["rope_theta", "rope_local_base_freq", ...facts.bases, ...(family.theta ?? [])].some((key) => given(config[key]));
  const nothing = dicts.some(([, p]) => "rope_theta" in p || Object.values(p).includes(null));
  if (!anyBase && computes("transformers-5") && !nothing) say(0, "PD004", { family: config.model_type });
  for (const [place, values] of [["", config], ...dicts])
    for (const key of facts.numbers)
      if (typeof values[key] === "string") say(0, place ? "PD005.in" : "PD005", { key, place, value: repr(values[key]), text: values[key] });
  for (const [name, p] of dicts) {
    const { type, rope_type: fine, factor } = p;
    if (given(type) && given(fine) && type !== fine && !(type === "su" && fine === "longrope") && !(type === "mrope" && fine === "default"))
      say(0, "PD006", { name, type: repr(type), fine: repr(fine) });
    const kind = fine !== undefined ? fine : type;
    const stretches = given(factor) && factor !== 1;
    if (!(old && name === "rope_parameters")) {
      if (!given(kind) && (stretches || fine !== undefined)) say(0, fine === undefined ? "PD008" : "PD008.null", { name, factor: repr(factor) });
      else if (kind === "default" && stretches) say(0, "PD008.default", { name, factor: repr(factor) }, "PD008.default");
    }
    if (![...facts.types, ...facts.old].includes(kindOf(p))) say(0, "PD009", { name, kind: repr(kindOf(p)) });
    const sort = { su: "longrope", mrope: "default" }[kindOf(p)] ?? kindOf(p);
    const read = Object.hasOwn(facts.read, sort) ? facts.read[sort] : null;
    if (!read || !("type" in p || "rope_type" in p)) continue;
    const fits = new Set([...facts.common, ...read, ...facts.own]);
    const unread = Object.keys(p).filter((key) => !fits.has(key)).sort();
    const kept = sort === "default" && !("rope_type" in p) ? unread.filter((key) => key !== "factor") : unread;
    if (kept.length) say(1, "PD010", { name, kind: sort, values: kept.slice(0, 4).map((key) => `${key} ${repr(p[key])}`).join(", ") });
  }
  for (const [name, p] of ofType(...STRETCHED)) {
    const outer = config[ORIGINAL];
    if (!given(p[ORIGINAL]) && !given(outer) && largest) say(0, "PD011", { name, largest });
    if (!given(outer) || family.original) continue;
    if (!given(p[ORIGINAL])) say(1, "PD012", { name, outer });
    else if (p[ORIGINAL] !== outer) say(1, "PD012.differ", { name, outer, inner: p[ORIGINAL] });
  }
  for (const [name, p] of ofType("yarn", "longrope")) {
    const { factor } = p, original = originalOf(p);
    if (!(isNumber(factor) && isNumber(original) && factor > 0 && original > 0 && largest)) continue;
    const ratio = largest / original;
    if (ratio > 1 && !near(ratio, factor, 0.01)) say(1, "PD013", { name, factor: short(factor), largest, original: short(original), ratio: short(ratio) });
    if (kindOf(p) !== "yarn") continue;
    const rows = Math.trunc(original * factor * (1 + 1e-12));
    if (largest > rows) say(0, "PD014", { name, largest, original: short(original), rows });
    if (factor > 1 && original === largest) say(1, "PD015", { name, original, factor: short(factor), largest, rows });
  }
  for (const [name, p] of ofType("linear", "dynamic", "ntk", "proportional")) {
    const got = ["vllm", "sglang"].filter((server) => computes(server)?.limit > largest);
    if (isNumber(p.factor) && p.factor > 1 && got.length)
      say(1, "PD016", { name, factor: short(p.factor), admitted: computes(got[0]).limit, got, largest });
  }
  for (const [name, p] of ofType("linear", "dynamic", ...STRETCHED)) {
    const original = originalOf(p);
    if (isNumber(p.factor) && 0 < p.factor && p.factor < 1) say(0, "PD044.factor", { name, factor: short(p.factor), inverse: short(1 / p.factor) }, "PD044.factor");
    if (p.factor === 1) say(2, "still", { name }, "still");
    if (isNumber(original) && largest && original > largest) say(0, "PD044", { original: short(original), name, largest });
  }
  for (const [name, { low_freq_factor: low, high_freq_factor: high }] of ofType("llama3"))
    if (isNumber(low) && isNumber(high) && !(low < high) && !(config.model_type.startsWith("llama4") && low === high))
      say(0, "PD045", { name, low: short(low), high: short(high) }, low > high ? "PD045.exchange" : "PD045");
  for (const [name, { beta_fast: fast = 32, beta_slow: slow = 1 }] of ofType("yarn"))
    if (isNumber(fast) && isNumber(slow) && fast < slow) say(0, "PD045.yarn", { name, fast: short(fast), slow: short(slow) });
  for (const [place, { rope_theta: theta }] of [["", config], ...dicts])
    if (isNumber(theta) && 0 < theta && theta < facts.smallest) say(0, place ? "PD046.in" : "PD046", { place, theta: short(theta) });
  for (const [place, key, meant] of slips(config, family, dicts)) say(-1, place ? "PD047.in" : "PD047", { place, key, meant }, "PD047");
  const { hidden_size: hidden, num_attention_heads: heads, num_key_value_heads: groups } = config;
  if (!family.latent && !("kv_lora_rank" in config)) {
    if (isSize(hidden) && isSize(heads) && !family.head && !given(config.head_dim) && !family.names?.length && hidden > heads && hidden % heads)
      say(0, "PD049", { hidden, heads });
    if (isSize(heads) && isSize(groups) && heads % groups) say(0, "PD049.groups", { heads, groups });
  }
  for (const [name, p] of ofType(...Object.keys(facts.needed))) {
    const lacks = facts.needed[kindOf(p)].filter((key) => !given(p[key]));
    if (!lacks.length || (kindOf(p) === "dynamic" && given(p.alpha))) continue;
    const original = originalOf(p);
    const known = lacks.join() === "factor" && isSize(largest) && isSize(original);
    say(0, "PD052", { name, kind: kindOf(p), lacks, largest, original, ratio: known ? short(largest / original) : "" }, known ? "PD052.factor" : "PD052");
  }
  const { layer_types: kinds, num_hidden_layers: count } = config;
  if (Array.isArray(kinds) && isSize(count) && kinds.length !== count && !config.num_nextn_predict_layers)
    say(0, "PD053", { length: kinds.length, count });
  return { found: found.sort((a, b) => a.rank - b.rank), stop: null };
}

// The older runtimes that do not read rope_parameters as transformers 5 does; null if the table
// does not know.
function readersOf(runtimes) {
  const meant = runtimes?.["transformers-5"];
  const known = OLD_READERS.filter((name) => !["no model", "unknown"].includes(runtimes?.[name]?.a));
  if (meant?.a !== "computes" || known.some((name) => runtimes[name]?.a === "doctor")) return null;
  const other = ({ a, why }) => a === "refuses" && (!why.includes("positional argument") || /rope|rotary|max_position/.test(why));
  const differs = known.filter((name) => other(runtimes[name]) || (runtimes[name].a === "computes" && !sameRotation(runtimes[name], meant)));
  return differs.length ? differs : known.length ? known : null;
}

const kindsOf = (answer) => answer.kinds ?? [{ kind: "all", freq: answer.freq, scale: answer.scale }];

export function sameRotation(a, b) {
  const [x, y] = [kindsOf(a), kindsOf(b)];
  return x.length === y.length && x.every((one, i) =>
    one.kind === y[i].kind && near(one.scale, y[i].scale, 1e-6) && one.freq.length === y[i].freq.length &&
    one.freq.every((f, k) => near(f, y[i].freq[k], 1e-6)));
}
