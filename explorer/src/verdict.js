// What the page says of a config, gravest first: the panel of the config and the first one say it.

import { answers, isClear, letters } from "./configs.js";
import { state } from "./state.js";
import { language, sentences, t } from "./words.js";

// What `posenc explore MODEL` computed of a config by posenc itself; null for another text.
let given = null;
export const setGiven = (made) => {
  given = made;
};
export const isGiven = () => Boolean(given) && state.config === given.text;
export const path = () => (isGiven() ? given.path : "config.json");

// The emulators' own answers, in the shape of answers().
function exact() {
  const runtimes = {};
  for (const [name, found] of Object.entries(given.runtimes)) {
    const a = { computes: "computes", refuses: "refuses", "no such model": "no model" }[found.answer] ?? "unknown";
    const kinds = Object.entries(found.layers).map(([kind, layer]) => ({ kind, freq: layer.inv_freq, scale: layer.multiplier }));
    runtimes[name] = { a, why: found.error, kinds, limit: found.max_length, switch: found.switch };
  }
  return { runtimes, exact: true };
}

let last = {};
export function found() {
  if (last.text !== state.config) last = { text: state.config, found: answers(state.config), exact: isGiven() ? exact() : null };
  return last.exact ?? last.found;
}

// The findings in the page's language; of the doctor's own, those that the page has no words for
// stay English.
export function findings() {
  found();
  const own = (last.found.findings ?? []).map((one) => {
    const said = (lang) => ({ code: one.rank > 1 ? "" : one.code, message: t(one.key, one.values, lang), cure: t(one.cure, one.values, lang) });
    return { ...said(language()), grave: one.rank < 1, english: said("en").message };
  });
  if (!last.exact) return own;
  const plain = (text) => text.replace(/(\d)\.0\b/g, "$1");
  return given.findings.map(({ code, severity, message, cure }) => {
    const match = language() === "en" ? null : own.find((one) => one.code === code && plain(one.english) === plain(message));
    return match ?? { code, message, cure, grave: severity === "E" };
  });
}

// Sentences about the config as a whole.
export function lines() {
  const { runtimes, family, problem, values, missing = [], stop } = found();
  if (problem && !last.exact) return [t(problem, values)];
  const named = (a) => Object.entries(runtimes).filter(([, answer]) => answer.a === a).map(([name]) => name);
  const many = (key, names, one, all) => names.length ? [t(names.length > 1 ? all : one, { [key]: names })] : [];
  const { count } = letters(runtimes);
  const computing = named("computes");
  const agree = `answer.agree${computing.length < Object.keys(runtimes).length ? "some" : ""}`;
  const still = !stop && findings().some(({ code }) => code) ? "still" : "";
  const open = named("doctor");
  const said = [...many("keys", missing.slice(0, 4), "finding.missing", "finding.missingmany")];
  if (last.exact && given.unjudged) said.push(t("finding.unjudged", { why: given.unjudged.replace(/\.$/, "") }));
  else if (last.exact && !given.findings.length) said.push(t("finding.clean"));
  const mend = stop && last.found.findings.some(({ rank }) => rank < 2);
  if (mend) said.push(t("finding.until", { path: path() }));
  else if (stop) said.push(t(stop === "model_type" ? "finding.family" : "finding.stopped", { key: stop, family, path: path() }));
  if (count > 1) said.push(t("answer.differ", { count }));
  if (count === 1) said.push(computing.length > 1 ? t(agree + still, { n: computing.length }) : t("answer.one", { names: computing }));
  said.push(...many("names", named("refuses"), "answer.refusedone", "answer.refused"));
  if (open.length < Object.keys(runtimes).length) said.push(...many("names", open, "answer.someone", "answer.some"));
  return said;
}

// What must be said before numbers of the config are drawn elsewhere; "" if there is nothing.
export function caution() {
  const shown = found();
  if (!shown.runtimes) return "";
  const first = findings()[0];
  if (first) return t("wave.broken", { why: `${first.code} ${first.message}`.trim() });
  const clear = shown.exact ? !given.unjudged && letters(shown.runtimes).count < 2 : isClear(shown);
  return clear ? "" : t("wave.unsure", { why: sentences(lines()) });
}
