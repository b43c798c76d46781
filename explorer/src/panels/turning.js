// Pairs as hands of clocks: where each stands at a position, and which angles training showed.

import { arc } from "d3-shape";
import { slider, steps } from "../controls.js";
import { el, figure, short, whole } from "../draw.js";
import { TURN, plain, scaled, trained } from "../formulas.js";
import { state, update } from "../state.js";
import { t } from "../words.js";
import { chosen, scalingChoice, settings } from "./wavelength.js";

const DIALS = 8;
const SECONDS = 12;
export const position = () => Math.min(state.position, state.original * state.factor);

function draw(width) {
  const s = settings();
  const pairs = s.dim / 2;
  const shown = Array.from({ length: DIALS }, (_, i) => Math.round((i * (pairs - 1)) / (DIALS - 1)));
  const columns = width < 560 ? 2 : 4;
  const cell = width / columns;
  const radius = Math.min(cell * 0.36, 78);
  const tall = 2 * radius + 62;
  const { freq } = scaled(chosen(), s);
  const states = trained(freq, s);
  const original = plain(s.dim, s.base);
  const children = shown.map((pair, i) => {
    const cx = (i % columns) * cell + cell / 2;
    const cy = Math.floor(i / columns) * tall + radius + 30;
    const angle = position() * freq[pair];
    const showed = Math.min(s.original * original[pair], TURN);
    const isNew = states[pair] !== "whole" && angle > showed * (1 + 1e-9);
    const wedge = arc().innerRadius(0).outerRadius(radius);
    const rim = arc().innerRadius(radius - 3).outerRadius(radius + 3);
    const hand = [cx + radius * Math.sin(angle), cy - radius * Math.cos(angle)];
    return el("g", {},
      el("text", { x: cx, y: cy - radius - 14, "text-anchor": "middle", class: isNew ? "name new" : "name" },
        t(isNew ? "turn.new" : "turn.pair", { pair })),
      el("circle", { cx, cy, r: radius, class: "dial" }),
      el("path", { d: wedge({ startAngle: 0, endAngle: showed }), transform: `translate(${cx},${cy})`, class: "shown" }),
      isNew && el("path", {
        d: rim({ startAngle: showed, endAngle: Math.min(angle, showed + TURN) }),
        transform: `translate(${cx},${cy})`, class: "unseen",
      }),
      el("line", { x1: cx, y1: cy, x2: hand[0], y2: hand[1], class: isNew ? "hand new" : "hand" }),
      isNew ? mark(hand) : el("circle", { cx: hand[0], cy: hand[1], r: 5, class: "knob" }),
      el("text", { x: cx, y: cy + radius + 20, "text-anchor": "middle", class: "small" },
        t("turn.every", { n: short(TURN / freq[pair]) })));
  });
  return { children, height: Math.ceil(DIALS / columns) * tall };
}

const mark = ([x, y]) =>
  el("path", { d: `M${x},${y - 7}L${x + 7},${y}L${x},${y + 7}L${x - 7},${y}Z`, class: "knob new" });

export function turning() {
  const dials = figure(() => t("turn.title"), draw);
  const where = el("p", { class: "finding" });
  let running = null;
  const button = el("button", { type: "button", class: "action", onclick: () => (running ? stop() : play()) });
  const stop = () => {
    cancelAnimationFrame(running);
    running = null;
    update({});
  };
  const play = () => {
    const target = state.original * state.factor;
    const from = position() >= target ? 0 : position();
    let start = null;
    const tick = (now) => {
      start ??= now;
      const next = from + ((now - start) / 1000 / SECONDS) * target;
      update({ position: Math.round(Math.min(next, target)) });
      if (next < target) running = requestAnimationFrame(tick);
      else running = null;
    };
    running = requestAnimationFrame(tick);
  };
  const line = el("div", { class: "controls play" });
  let length = 0;
  const render = () => {
    const target = Math.round(state.original * state.factor);
    if (length !== target) {
      // The slider's range follows the lengths above.
      length = target;
      const each = steps.whole(0, 400).map((i) => Math.round((target * i) / 400));
      line.replaceChildren(slider("position", each, whole), button);
    }
    button.textContent = t(running ? "turn.stop" : "turn.play");
    where.textContent = t(position() > state.original ? "turn.past" : "turn.within", {
      position: whole(position()), original: whole(state.original),
    });
    dials.render();
  };
  return { node: [scalingChoice(), line, where, dials.node], render };
}
