// The page's words in two languages; strings.json has each sentence once in both.

import strings from "./strings.json";
import { state } from "./state.js";

export const LANGUAGES = { en: "English", zh: "中文" };

export const language = () =>
  state.lang in LANGUAGES ? state.lang : navigator.language.startsWith("zh") ? "zh" : "en";

export function t(key, values = {}) {
  const found = strings[key];
  if (!found) throw new Error(`no words for ${key}`);
  return found[language()].replace(/\{(\w+)\}/g, (_, name) => values[name]);
}

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
