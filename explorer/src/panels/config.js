// A pasted config.json: what each runtime computes from it.

import { RUNTIMES, letters, numbersOf } from "../configs.js";
import { el, number, short, whole } from "../draw.js";
import { TURN } from "../formulas.js";
import { state, update } from "../state.js";
import { findings, found, isGiven, lines, path } from "../verdict.js";
import { sentences, t } from "../words.js";

// YaRN for vLLM and transformers 5 with the base where transformers 4 does not look.
const EXAMPLE = {
  model_type: "qwen2", hidden_size: 3584, intermediate_size: 18944, num_attention_heads: 28,
  num_key_value_heads: 4, num_hidden_layers: 28, vocab_size: 152064, rms_norm_eps: 1e-6,
  max_position_embeddings: 32768,
  rope_parameters: { rope_type: "yarn", factor: 4, original_max_position_embeddings: 32768, rope_theta: 1000000 },
};

const kindsOf = (answer) => answer.kinds ?? [{ kind: "all", freq: answer.freq, scale: answer.scale }];

function words(answer, v) {
  if (answer.a === "refuses") return t("answer.refuses", { why: answer.why });
  if (answer.a !== "computes") return t(`answer.${answer.a.replace(" ", "")}`);
  if (answer.kinds) {
    return answer.kinds.map(({ kind, freq }) => {
      const moving = freq.filter((f) => f > 0);
      const turn = (freq) => freq ? short(TURN / freq) : "–";
      const said = t("answer.pairs", { pairs: moving.length, middle: turn(moving[moving.length >> 1]), slow: turn(moving.at(-1)) });
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

function list(all) {
  return [
    el("p", { class: "small-print" }, t("finding.head")),
    el("ul", { class: "findings" }, all.map(({ code, message, cure, grave }) =>
      el("li", { class: grave ? "grave" : null },
        el("p", {}, code && el("strong", {}, code), code && " ", message),
        el("p", { class: "method" }, t("finding.cure", { cure }))))),
  ];
}

export function config(given) {
  const area = el("textarea", {
    spellcheck: "false", autocomplete: "off", autocapitalize: "off", id: "config-text", class: given ? "given" : null,
  });
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
  const wrong = el("div", { "aria-live": "polite" });
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
    const shown = found();
    const all = findings();
    const ran = Object.values(shown.runtimes ?? {}).some(({ a }) => a !== "doctor");
    wrong.replaceChildren(...(all.length ? list(all) : []));
    finding.textContent = sentences(lines());
    result.replaceChildren(...(ran ? [table(shown)] : []));
    notes.textContent = ran ? t(shown.exact ? "answer.exact" : "answer.notes") : t("config.private");
    after.textContent = t("config.run");
    line.textContent = `posenc doctor ${path()}`;
    line.hidden = after.hidden = !isGiven() && ["config.empty", "config.long"].includes(shown.problem);
  };
  return {
    node: [label, area, el("div", { class: "tools" }, example, use, clear), wrong, finding, result, notes, after, line],
    render,
  };
}
