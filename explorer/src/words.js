// The page's words in two languages; strings.json has each sentence once in both.

import strings from "./strings.json";
import { state } from "./state.js";

export const LANGUAGES = { en: "English", zh: "中文" };

export const language = () =>
  state.lang in LANGUAGES ? state.lang : navigator.language.startsWith("zh") ? "zh" : "en";

// A value that is a list is written as one; within it, [key, values] is a sentence.
export function t(key, values = {}, lang = language()) {
  const found = strings[key];
  if (!found) throw new Error(`no words for ${key}`);
  const written = (x) => (Array.isArray(x) ? t(x[0], x[1], lang) : String(x));
  return found[lang].replace(/\{(\w+)\}/g, (_, name) => {
    const value = values[name];
    if (!Array.isArray(value)) return value;
    const all = value.map(written);
    const comma = strings["list.comma"][lang];
    if (all.length < 2 || Array.isArray(value[0])) return all.join(comma);
    return t("list.two", { head: all.slice(0, -1).join(comma), last: all.at(-1) }, lang);
  });
}

// Sentences one after another; Chinese has no space between them.
export const sentences = (all) => all.join(language() === "zh" ? "" : " ");

// A text node that changes with the language; `words` is in a paragraph or a heading.
export const said = [];
export function word(node, key, values = () => ({})) {
  const show = () => {
    node.textContent = t(key, values());
  };
  said.push(show);
  show();
  return node;
}
