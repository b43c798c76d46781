// Build the page: a head, a sentence, seven panels, a foot; draw again when something changes. The
// panel of the config is the last, or the first where a link or the command brings one.

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
import { DEFAULTS, fragment, isCut, onChange, readLink, state, update } from "./state.js";
import { setGiven } from "./verdict.js";
import { language, said, t, word } from "./words.js";

const PANELS = {
  turn: turning, wave: wavelength, scores, bias: biases, mask: masks, round: roundings.rounding, config,
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
  const copy = el("button", { type: "button", class: "action", id: "copy" });
  const told = el("p", { class: "method", id: "copied", "aria-live": "polite" });
  copy.addEventListener("click", async () => {
    const link = sharedLink();
    try {
      await navigator.clipboard.writeText(link);
      told.textContent = t("page.copied");
    } catch {
      told.textContent = t("page.notcopied", { link });
    }
    if (isCut()) told.textContent += ` ${t("page.cut")}`;
  });
  word(other, "page.other");
  word(copy, "page.copy");
  return el("header", {},
    el("div", { class: "brand" }, el("strong", {}, "posenc explore"), copy, other), told,
    word(el("h1"), "page.title"), word(el("p", { class: "lead" }), "page.lead"));
}

// What "Copy link" copies: an address where the page has one that others can open, else its fragment.
// The language is in it, because a browser would choose its own.
function sharedLink() {
  const view = fragment();
  const whole = view.includes("lang=") ? view : `${view}${view === "#" ? "" : "&"}lang=${language()}`;
  return location.protocol.startsWith("http") ? location.href.split("#")[0] + whole : whole;
}

const broughtConfig = state.config !== "";
const panels = Object.entries(PANELS).map(([name, make], i) => {
  const panel = make(given);
  const step = name === "config" && broughtConfig ? "" : String(i + 1);
  const node = el("section", { id: name },
    el("h2", {}, el("span", { class: "step", "aria-hidden": "true" }, step), word(el("span"), `${name}.heading`)),
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

const configNode = panels.find(({ name }) => name === "config").node;
const rest = panels.map(({ node }) => node).filter((node) => node !== configNode);
const sections = broughtConfig ? [configNode, beginning, nav, ...rest] : [beginning, nav, ...rest, configNode];
document.getElementById("page").append(
  head(), ...sections,
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
if (given && !location.hash) configNode.scrollIntoView({ behavior: "instant" });

addEventListener("hashchange", () => {
  const found = readLink(location.hash);
  if (Object.keys(found).length) update(found);
});

// For tests, which hold these to posenc.
window.explorer = { formulas, state, defaults: DEFAULTS, update, answers, isClear, words: t, roundings };
