// Wavelength of each pair against training and target length, for every scaling.

import { scaleLinear, scaleLog } from "d3-scale";
import { line } from "d3-shape";
import { numbersOf } from "../configs.js";
import { choice, slider, steps } from "../controls.js";
import data from "../data.json";
import { apart, el, figure, number, powers, short, whole, xAxis, yAxis } from "../draw.js";
import { SCALINGS, TURN, plain, scaled, trained } from "../formulas.js";
import { state } from "../state.js";
import { caution } from "../verdict.js";
import { t, word } from "../words.js";

let seen = null;
let factors = null;

// Factors of LongRoPE come from the pasted config.
function longrope() {
  if (seen !== state.config) factors = numbersOf(state.config)?.factors ?? null;
  seen = state.config;
  return factors;
}

export const settings = () => ({
  dim: state.dim, base: state.base, factor: state.factor, original: state.original, longrope: longrope(),
});
export const chosen = () => (scaled(state.scaling, settings()) ? state.scaling : "none");
export const scalingChoice = () =>
  choice("scaling", SCALINGS, (name) => t(`scaling.${name}`), "control.scaling", (name) =>
    Boolean(scaled(name, settings())),
  );

// The token at which the first pair meets an angle that training never showed; null if none does up to
// the target length.
export function firstNewToken(freq, s) {
  const states = trained(freq, s);
  const slow = plain(s.dim, s.base).map((f, i) => (s.original * f) / freq[i]);
  const met = slow.filter((_, i) => states[i] === "beyond");
  return met.length ? Math.floor(Math.min(...met) + 1e-6) : null;
}

// One mark for each state, different in shape as well as in colour.
export function mark(kind, x, y, size = 4) {
  if (kind === "whole") return el("circle", { cx: x, cy: y, r: size, class: "whole" });
  if (kind === "inside") return el("circle", { cx: x, cy: y, r: size - 0.75, class: "inside" });
  const d = `M${x - size},${y - size}L${x + size},${y + size}M${x - size},${y + size}L${x + size},${y - size}`;
  return el("path", { d, class: "beyond" });
}

export const legend = () =>
  el("ul", { class: "legend" }, ["whole", "inside", "beyond"].map((kind) =>
    el("li", {},
      el("svg", { width: 14, height: 14, viewBox: "0 0 14 14", "aria-hidden": "true" }, mark(kind, 7, 7)),
      el("span", {}, t(`state.${kind}`))),
  ));

function chart(width) {
  const s = settings();
  // RoPE as trained, and the chosen scaling against it.
  const curves = [...new Set(["none", chosen()])].map((name) => ({ name, ...scaled(name, s) }));
  const target = s.original * s.factor;
  const narrow = width < 560;
  const left = 46, right = width - (narrow ? 98 : 118), top = 30, bottom = narrow ? 236 : 400;
  const waves = curves.flatMap((c) => c.freq.map((f) => TURN / f));
  const high = Math.max(...waves, target) * 1.6;
  const x = scaleLinear([0, s.dim / 2 - 1], [left + 6, right - 6]);
  const y = scaleLog([4, high], [bottom, top]);
  const path = line((f, i) => x(i), (f) => y(TURN / f));
  const main = curves.find((c) => c.name === chosen());
  const states = trained(main.freq, s);
  const every = Math.max(1, Math.ceil(s.dim / 2 / ((right - left) / 9)));
  const labels = apart(
    curves.map((c) => ({ c, y: y(TURN / c.freq.at(-1)) + 4 })), 15, top + 8, bottom,
  );
  const reference = [
    { at: s.original, key: "wave.original" },
    ...(s.factor > 1 ? [{ at: target, key: "wave.target" }] : []),
  ];
  const close = reference.length > 1 && Math.abs(y(target) - y(s.original)) < 16;
  const children = [
    yAxis(y, powers(10, high), short, left, right, t("wave.y")),
    xAxis(x, x.ticks(narrow ? 4 : 8).filter(Number.isInteger), String, bottom, bottom, t("wave.x")),
    el("rect", {
      x: left, width: right - left, y: y(Math.min(high, s.original)), height: bottom - y(s.original),
      class: "seen",
    }),
    reference.map(({ at, key }, i) => [
      el("line", { x1: left, x2: right, y1: y(at), y2: y(at), class: "reference" }),
      el("text", {
        x: left + 6, y: y(at) + (close && i === 0 ? 15 : -6), class: "reference-label",
      }, t(key, { n: whole(at) })),
    ]).flat(),
    curves.filter((c) => c !== main).map((c) => el("path", { d: path(c.freq), class: "other" })),
    el("path", { d: path(main.freq), class: "main" }),
    main.freq.map((f, i) => (i % every && i !== s.dim / 2 - 1 ? null : mark(states[i], x(i), y(TURN / f)))),
    labels.map(({ c, at, y: own }) => [
      el("path", {
        d: `M${right - 4},${own - 4}L${right + 8},${at - 4}`, class: c === main ? "lead main" : "lead",
      }),
      el("text", { x: right + 11, y: at, class: c === main ? "name chosen" : "name" },
        t(`scaling.${c.name}`)),
    ]).flat(),
  ];
  return { children, height: bottom + 44 };
}

// A row for RoPE as trained and one for the chosen scaling, one cell a pair: which pairs meet new
// angles, and what else it changes.
function overview() {
  const s = settings();
  const rows = [...new Set(["none", chosen()])].map((name) => {
    const found = scaled(name, s);
    const states = trained(found.freq, s);
    const beyond = states.filter((kind) => kind === "beyond").length;
    const slowed = 1 / found.freq[0];
    return el("tr", { class: name === chosen() ? "chosen" : null },
      el("th", { scope: "row" }, t(`scaling.${name}`)),
      el("td", {}, el("div", { class: "strip", role: "img", "aria-label": t("wave.strip", { n: beyond }) },
        states.map((kind) => el("span", { class: kind })))),
      el("td", { class: "number" }, String(beyond)),
      el("td", { class: "number" }, slowed > 1.0005 ? `÷ ${number(slowed)}` : "–"),
      el("td", { class: "number" }, found.scale === 1 ? "–" : `× ${number(found.scale ** 2, 4)}`));
  });
  return el("table", {},
    el("thead", {}, el("tr", {},
      ["method", "pairs", "beyond", "fast", "logits"].map((key) =>
        el("th", { scope: "col", class: ["method", "pairs"].includes(key) ? null : "number" }, t(`wave.${key}`))))),
    el("tbody", {}, rows));
}

// What each scaling did to a small Llama that posenc extended: no new angles, and yet not alike.
function measured() {
  const { methods, trained: length, target } = data.measured;
  const rows = SCALINGS.filter((name) => methods[name]).map((name) => {
    const { beyond, far, near } = methods[name];
    return el("tr", { class: name === chosen() ? "chosen" : null },
      el("th", { scope: "row" }, t(`scaling.${name}`)),
      el("td", { class: "number" }, String(beyond)),
      el("td", { class: "number" }, number(far)),
      el("td", { class: "number" }, `× ${near.toFixed(2)}`));
  });
  const heads = {
    method: {}, beyond: {}, far: { start: whole(0.75 * target), stop: whole(target) }, near: { n: whole(length) },
  };
  return el("table", {},
    el("thead", {}, el("tr", {}, Object.entries(heads).map(([key, values]) =>
      el("th", { scope: "col", class: key === "method" ? null : "number" },
        t(["method", "beyond"].includes(key) ? `wave.${key}` : `measured.${key}`, values))))),
    el("tbody", {}, rows));
}

// The numbers of the sentences about that Llama.
function aboutMeasured() {
  const { methods, window, trained: length, target, pairs } = data.measured;
  const without = Object.values(methods).filter(({ beyond }) => beyond === 0).map(({ far }) => far);
  return {
    pairs, trained: whole(length), target: whole(target), window: number(window),
    best: number(Math.min(...without)), worst: number(Math.max(...without)),
  };
}

export function finding() {
  const s = settings();
  const name = chosen();
  const states = trained(scaled(name, s).freq, s);
  const count = (kind) => states.filter((each) => each === kind).length;
  const key = s.factor <= 1 ? "wave.nothing" : count("beyond") ? "wave.breaks" : "wave.holds";
  return t(key, {
    method: t(`scaling.${name}`), beyond: count("beyond"), pairs: states.length, whole: count("whole"),
    original: whole(s.original), target: whole(s.original * s.factor),
    first: whole(firstNewToken(scaled(name, s).freq, s) ?? 0),
  });
}

// True if the sliders show what the config says.
function ofConfig() {
  const numbers = numbersOf(state.config);
  return Boolean(numbers) && ["base", "dim", "original", "factor"].every((key) => !(key in numbers) || numbers[key] === state[key]);
}

export function wavelength() {
  const chart1 = figure(() => t("wave.title"), chart);
  const table = el("div", { class: "table overview" });
  const warning = el("p", { class: "warning", "aria-live": "polite" });
  const headline = el("p", { class: "finding", "aria-live": "polite" });
  const method = el("p", { class: "method" });
  const keys = el("div", {});
  const sizes = [32, 64, 80, 96, 128, 192, 256];
  const shown = el("div", { class: "shown-while" }, headline, chart1.node);
  const sliders = el("div", { class: "controls" },
    slider("base", [1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6, 2e6, 5e6, 1e7, 1e8], whole),
    slider("factor", [1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 40, 64], (x) => `× ${number(x)}`),
    slider("dim", sizes, whole),
    slider("original", steps.geometric(512, 2, 262144), whole));
  const small = el("div", { class: "table small-llama" });
  const node = [
    warning, el("div", { class: "stage" }, shown, sliders, scalingChoice()), method, keys, table,
    word(el("h3", { class: "measured" }), "measured.heading"), word(el("p"), "measured.intro", aboutMeasured), small,
    word(el("p", { class: "method" }), "measured.notes"),
  ];
  const render = () => {
    warning.textContent = ofConfig() ? caution() : "";
    warning.hidden = !warning.textContent;
    headline.textContent = finding();
    method.textContent = t(`about.${chosen()}`);
    keys.replaceChildren(legend());
    table.replaceChildren(overview());
    small.replaceChildren(measured());
    chart1.render();
  };
  return { node, render };
}
