// Build the page: a head, a sentence, seven panels, a foot; draw again when something changes.

import { answers, isClear, numbersOf } from "./configs.js";
import * as formulas from "./formulas.js";
import { el } from "./draw.js";
import { biases } from "./panels/biases.js";
import { config } from "./panels/config.js";
import { masks } from "./panels/masks.js";
import * as roundings from "./panels/rounding.js";
import { sentence } from "./panels/sentence.js";
import { scores } from "./panels/scores.js";
import { turning } from "./panels/turning.js";
import { wavelength } from "./panels/wavelength.js";
import { DEFAULTS, onChange, readLink, state, update } from "./state.js";
import { setGiven } from "./verdict.js";
import { language, said, t, word } from "./words.js";

const PANELS = {
  wave: wavelength, turn: turning, scores, bias: biases, config, mask: masks, round: roundings.rounding,
};

const given = JSON.parse(document.getElementById("given").textContent);
if (given) {
  const { factors, ...numbers } = numbersOf(given.text) ?? {};
  Object.assign(state, numbers, { config: given.text });
  setGiven(given);
}
Object.assign(state, readLink(location.hash));

function head() {
  const other = el("button", {
    type: "button", class: "action", id: "language",
    onclick: () => update({ lang: language() === "en" ? "zh" : "en" }),
  });
  const copy = el("button", { type: "button", class: "action" });
  let copied = "page.copy";
  copy.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(location.href);
      copied = "page.copied";
    } catch {
      copied = "page.notcopied";
    }
    copy.textContent = t(copied);
    setTimeout(() => {
      copied = "page.copy";
      copy.textContent = t(copied);
    }, 2500);
  });
  word(other, "page.other");
  word(copy, "page.copy");
  return el("header", {},
    el("div", { class: "brand" }, el("strong", {}, "posenc explore"), copy, other),
    word(el("h1"), "page.title"), word(el("p", { class: "lead" }), "page.lead"));
}

const panels = Object.entries(PANELS).map(([name, make], i) => {
  const panel = make(given);
  const node = el("section", { id: name },
    el("h2", {}, el("span", { class: "step", "aria-hidden": "true" }, String(i + 1)), word(el("span"), `${name}.heading`)),
    word(el("p", { class: "intro" }), `${name}.intro`), panel.node);
  return { name, node, render: panel.render };
});

// The page begins with it; it has no number.
const opening = sentence();
const beginning = el("section", { id: "sentence" },
  el("h2", {}, word(el("span"), "sentence.heading")), word(el("p", { class: "intro" }), "sentence.intro"), opening.node);

const nav = el("nav", {}, el("ol", {}, panels.map(({ name }) =>
  el("li", {}, word(el("a", { href: `#${name}`, onclick: (event) => jump(event, name) }), `${name}.short`)))));

// The address holds the view, so links to panels scroll without changing it.
function jump(event, name) {
  event.preventDefault();
  const section = document.getElementById(name);
  section.scrollIntoView();
  section.querySelector("h2").setAttribute("tabindex", "-1");
  section.querySelector("h2").focus({ preventScroll: true });
}

document.getElementById("page").append(
  head(), beginning, nav, ...panels.map(({ node }) => node),
  el("footer", {}, word(el("p"), "page.foot")),
);

function show() {
  document.documentElement.lang = language() === "zh" ? "zh-CN" : "en";
  document.title = t("page.title");
  nav.setAttribute("aria-label", t("page.panels"));
  said.forEach((each) => each());
  opening.render();
  panels.forEach(({ render }) => render());
}
onChange(show);
show();
if (given && !location.hash) document.getElementById("config").scrollIntoView({ behavior: "instant" });

addEventListener("hashchange", () => {
  const found = readLink(location.hash);
  if (Object.keys(found).length) update(found);
});

// For tests, which hold these to posenc.
window.explorer = { formulas, state, defaults: DEFAULTS, update, answers, isClear, words: t, roundings };
