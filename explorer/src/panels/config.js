// A pasted config.json: what each runtime computes from it.

import { RUNTIMES, answers, numbersOf } from "../configs.js";
import { el, number, short, whole } from "../draw.js";
import { TURN } from "../formulas.js";
import { state, update } from "../state.js";
import { t } from "../words.js";

// YaRN for vLLM and transformers 5 with the base where transformers 4 does not look.
const EXAMPLE = {
  model_type: "qwen2", hidden_size: 3584, intermediate_size: 18944, num_attention_heads: 28,
  num_key_value_heads: 4, num_hidden_layers: 28, vocab_size: 152064, rms_norm_eps: 1e-6,
  max_position_embeddings: 32768,
  rope_parameters: { rope_type: "yarn", factor: 4, original_max_position_embeddings: 32768, rope_theta: 1000000 },
};

// What `posenc explore MODEL` asked of the emulators themselves, in the shape of answers().
function exact(given) {
  const runtimes = {};
  for (const [name, found] of Object.entries(given.runtimes)) {
    const a = { computes: "computes", refuses: "refuses", "no such model": "no model" }[found.answer] ?? "unknown";
    const kinds = Object.entries(found.layers).map(([kind, layer]) => ({ kind, freq: layer.inv_freq, scale: layer.multiplier }));
    runtimes[name] = { a, why: found.error, kinds, limit: found.max_length, switch: found.switch };
  }
  return { runtimes, exact: true };
}

const kindsOf = (answer) => answer.kinds ?? [{ kind: "all", freq: answer.freq, scale: answer.scale }];

function same(a, b) {
  const [x, y] = [kindsOf(a), kindsOf(b)];
  const near = (p, q) => Math.abs(p - q) <= 1e-6 * Math.max(Math.abs(p), Math.abs(q));
  return x.length === y.length && x.every((one, i) =>
    one.kind === y[i].kind && near(one.scale, y[i].scale) && one.freq.length === y[i].freq.length &&
    one.freq.every((f, k) => near(f, y[i].freq[k])));
}

// Letters for different rotations: the same letter, the same numbers.
function letters(runtimes) {
  const groups = [];
  const found = {};
  for (const [name, answer] of Object.entries(runtimes)) {
    if (answer.a !== "computes") continue;
    let at = groups.findIndex((other) => same(answer, other));
    if (at < 0) at = groups.push(answer) - 1;
    found[name] = String.fromCharCode(65 + at);
  }
  return { found, count: groups.length };
}

function words(answer, v) {
  if (answer.a === "refuses") return t("answer.refuses", { why: answer.why });
  if (answer.a !== "computes") return t(`answer.${answer.a.replace(" ", "")}`);
  if (answer.kinds) {
    return answer.kinds.map(({ kind, freq }) => {
      const slow = freq.filter((f) => f > 0).at(-1);
      const said = t("answer.pairs", { pairs: freq.filter((f) => f > 0).length, slow: slow ? short(TURN / slow) : "–" });
      return answer.kinds.length > 1 ? `${kind}: ${said}` : said;
    }).join(" · ") || t("answer.still");
  }
  const ignored = v.kind !== "default" && answer.type === "default";
  const parts = [
    t(ignored ? (v.kind === "dynamic" ? "answer.dynamicplain" : "answer.ignored") : `answer.${answer.type}`, {
      factor: v.factor === undefined ? "" : number(v.factor), original: answer.original === null ? "" : whole(answer.original), max: whole(v.max),
    }),
    t("answer.base", { base: whole(answer.base) }),
  ];
  const gave = v.outer !== undefined || v.inner !== undefined;
  if (typeof answer.theta === "number") parts.push(t(gave ? "answer.basemissed" : "answer.basedefault"));
  else if (v.outer !== undefined && v.inner !== undefined && v.outer !== v.inner) parts.push(t(`answer.base${answer.theta}`));
  if (v.original !== undefined && answer.original !== null && answer.original !== v.original)
    parts.push(t("answer.lengthmissed", { original: whole(v.original) }));
  return parts.join(t("answer.comma"));
}

function table(found) {
  const { found: letter } = letters(found.runtimes);
  const row = ([name, answer]) => {
    const kinds = answer.a === "computes" ? kindsOf(answer) : [];
    return el("tr", {},
      el("th", { scope: "row" }, name, el("small", {}, RUNTIMES[name])),
      el("td", {}, letter[name] && el("span", { class: `letter letter${letter[name]}` }, letter[name])),
      el("td", { class: answer.a === "refuses" ? "refuses" : null }, words(answer, found.values)),
      el("td", { class: "number", "data-label": t("answer.head.scores") }, kinds.length ? kinds.map(({ scale }) => (scale === 1 ? "–" : `× ${number(scale ** 2, 4)}`)).join(" · ") : ""),
      el("td", { class: "number", "data-label": t("answer.head.limit") }, answer.a === "computes" ? (answer.limit ? whole(answer.limit) : t("answer.nolimit")) : ""));
  };
  return el("table", { class: "runtimes" },
    el("thead", {}, el("tr", {}, ["runtime", "group", "what", "scores", "limit"].map((key) =>
      el("th", { scope: "col", class: ["scores", "limit"].includes(key) ? "number" : null }, t(`answer.head.${key}`))))),
    el("tbody", {}, Object.entries(found.runtimes).map(row)));
}

function headline(found) {
  const all = Object.values(found.runtimes);
  const counted = (a) => all.filter((answer) => answer.a === a).length;
  const { count } = letters(found.runtimes);
  const said = [];
  if (count > 1) said.push(t("answer.differ", { count }));
  if (count === 1) said.push(t(counted("computes") > 1 ? "answer.agree" : "answer.one", { n: counted("computes") }));
  if (counted("refuses")) said.push(t("answer.refused", { n: counted("refuses") }));
  if (counted("doctor")) said.push(found.stop ? t("answer.stopped", { key: found.stop }) : t("answer.some"));
  return said.join(" ");
}

export function config(given) {
  const area = el("textarea", { spellcheck: "false", autocomplete: "off", autocapitalize: "off", id: "config-text" });
  area.addEventListener("input", () => update({ config: area.value }));
  const label = el("label", { for: "config-text", class: "small-print" });
  const button = (act) => el("button", { type: "button", class: "action", onclick: act });
  const example = button(() => update({ config: JSON.stringify(EXAMPLE, null, 2) }));
  const clear = button(() => update({ config: "" }));
  const use = button(() => {
    const { factors, ...numbers } = numbersOf(state.config);
    update({ ...numbers, position: 0 });
    document.getElementById("wave").scrollIntoView();
  });
  const finding = el("p", { class: "finding", "aria-live": "polite" });
  const result = el("div", { class: "table" });
  const notes = el("p", { class: "method" });
  const line = el("pre");
  const after = el("p", { class: "method" });
  const render = () => {
    if (area.value !== state.config) area.value = state.config;
    label.textContent = t("config.label");
    example.textContent = t("config.example");
    clear.textContent = t("config.clear");
    use.textContent = t("config.use");
    use.disabled = !numbersOf(state.config);
    const found = given && state.config === given.text ? exact(given) : answers(state.config);
    const ran = Boolean(found.runtimes);
    finding.textContent = ran ? headline(found) : t(found.problem, found.values);
    result.replaceChildren(...(ran ? [table(found)] : []));
    notes.textContent = ran ? t(found.exact ? "answer.exact" : "answer.notes") : t("config.private");
    after.textContent = t("config.run");
    line.textContent = `posenc doctor ${given && state.config === given.text ? given.path : "config.json"}`;
    line.hidden = after.hidden = found.problem === "config.empty" || found.problem === "config.long";
  };
  return {
    node: [label, area, el("div", { class: "tools" }, example, use, clear), finding, result, notes, after, line],
    render,
  };
}
