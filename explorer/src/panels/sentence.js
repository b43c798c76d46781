// Who attends to whom in a sentence, without positions and with them: the page's beginning.

import { choice } from "../controls.js";
import { el } from "../draw.js";
import { attentionWeights, wordVector } from "../formulas.js";
import { state, update } from "../state.js";
import { t, word } from "../words.js";

const MOST_WORDS = 6, MOST_LETTERS = 12;
const shown = (weight) => weight.toFixed(2);

const typedWords = () => (state.sentence.trim() || t("sentence.default")).split(/\s+/);

export const wordsOf = () => typedWords().slice(0, MOST_WORDS).map((w) => w.slice(0, MOST_LETTERS));

// The first and the last word in each other's place.
export const swapped = (words) => [words.at(-1), ...words.slice(1, -1), words[0]];

// The sentence with its shown words swapped; what was typed beyond them stays.
const swappedSentence = () =>
  [...swapped(typedWords().slice(0, MOST_WORDS)), ...typedWords().slice(MOST_WORDS)].join(" ");

const weightsOf = (words) => attentionWeights(words.map(wordVector), state.positions);

export function sentence() {
  const table = el("table", { class: "words", "aria-describedby": "sentence-about" });
  const finding = el("p", { class: "finding", "aria-live": "polite" });
  const input = el("input", { type: "text", id: "sentence-words", oninput: () => update({ sentence: input.value }) });
  const swap = el("button", {
    type: "button", class: "action", onclick: () => update({ sentence: swappedSentence() }),
  });
  word(swap, "sentence.swap");
  const label = word(el("label", { for: "sentence-words" }), "sentence.label");
  const pick = choice("positions", ["nope", "rope", "alibi"], (name) => t(`sentence.${name}`), "sentence.legend");
  const render = () => {
    const words = wordsOf();
    const weights = weightsOf(words);
    if (document.activeElement !== input) input.value = typedWords().join(" ");
    table.replaceChildren(
      el("thead", {}, el("tr", {}, el("td"), words.map((w) => el("th", { scope: "col" }, w)))),
      el("tbody", {}, words.map((w, q) => el("tr", {}, el("th", { scope: "row" }, w), weights[q].map((x) =>
        el("td", {}, el("span", { class: "bar", style: `width: ${Math.round(100 * x)}%` }), el("span", {}, shown(x))))))),
    );
    finding.textContent = whyNothingIsSeen(words) || said(words, weights);
  };
  const tools = el("div", { class: "tools" }, label, input, swap);
  const about = word(el("p", { class: "method", id: "sentence-about" }), "sentence.caption");
  return { node: [tools, pick, el("div", { class: "table" }, table), about, finding], render };
}

// Why swapping would show nothing, or "".
function whyNothingIsSeen(words) {
  if (words.length < 3) return t("sentence.short");
  return words[0] === words.at(-1) ? t("sentence.equal", { word: words[0] }) : "";
}

// What the second word gives to the first and to the last, now and with these two swapped.
function said(words, weights) {
  const later = weightsOf(swapped(words));
  const end = words.length - 1;
  const now = [weights[1][0], weights[1][end]];
  const then = [later[1][end], later[1][0]];
  const same = now.every((x, i) => Math.abs(x - then[i]) < 1e-9);
  const [a, b, c, d] = [...now, ...then].map(shown);
  return t(same ? "sentence.same" : "sentence.differs", {
    query: words[1], first: words[0], last: words[end], a, b, c, d,
  });
}
