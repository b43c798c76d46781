// Pairs as hands of clocks: slowly in the first hundred tokens, then up to the target length. A hand
// can be dragged, and moved by the arrow keys; all others follow.

import { arc } from "d3-shape";
import { choice, slider, steps } from "../controls.js";
import { el, figure, number, short, whole } from "../draw.js";
import { TURN, plain, sameScore, scaled } from "../formulas.js";
import { state, update } from "../state.js";
import { t } from "../words.js";
import { chosen, firstNewToken, scalingChoice, settings } from "./wavelength.js";

const DIALS = 8;
const FEW_TOKENS = 100;
const SECONDS = { near: 25, far: 12 };
const KEYS = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1, PageUp: 10, PageDown: -10, Home: -Infinity, End: Infinity };

const isNear = () => state.range === "near";
const last = () => (isNear() ? FEW_TOKENS : Math.round(state.original * state.factor));
export const position = () => Math.min(state.position, last());
const moveTo = (tokens) => update({ position: Math.round(Math.min(Math.max(tokens, 0), last())) });

// The first hundred tokens are read as in training: no scaling.
const speeds = () => (isNear() ? plain(state.dim, state.base) : scaled(chosen(), settings()).freq);

// The part of the circle that training showed of a pair, and where its hand stands in it.
function stand(pair, freq) {
  const { original, dim, base } = settings();
  const turned = position() * freq[pair];
  const showed = isNear() ? TURN : Math.min(original * plain(dim, base)[pair], TURN);
  return { turned, showed, isNew: showed < TURN && turned % TURN > showed * (1 + 1e-9) };
}

const shownPairs = () => {
  const pairs = state.dim / 2;
  return [...new Set(Array.from({ length: DIALS }, (_, i) => Math.round((i * (pairs - 1)) / (DIALS - 1))))];
};

function dial(pair, freq, { cx, cy, radius }) {
  const { turned, showed, isNew } = stand(pair, freq);
  const centre = `translate(${cx},${cy})`;
  const wedge = arc().innerRadius(0).outerRadius(radius);
  const rim = arc().innerRadius(radius - 3).outerRadius(radius + 3);
  const tip = [cx + radius * Math.sin(turned), cy - radius * Math.cos(turned)];
  const below = (line, key, values, kind) =>
    el("text", { x: cx, y: cy + radius + 19 + 15 * line, "text-anchor": "middle", class: kind }, t(key, values));
  return el("g", {
    "data-pair": pair, role: "slider", tabindex: 0, class: "turns",
    "aria-label": t("turn.pair", { pair }), "aria-valuemin": 0, "aria-valuemax": last(), "aria-valuenow": position(),
    "aria-valuetext": t("turn.at", { position: whole(position()), turns: number(turned / TURN, 2) }),
  },
    el("text", { x: cx, y: cy - radius - 12, "text-anchor": "middle", class: isNew ? "name new" : "name" }, t("turn.pair", { pair })),
    el("circle", { cx, cy, r: radius, class: "dial" }),
    !isNear() && el("path", { d: wedge({ startAngle: 0, endAngle: showed }), transform: centre, class: "shown" }),
    turned > showed && showed < TURN && el("path", {
      d: rim({ startAngle: showed, endAngle: Math.min(turned, TURN) }), transform: centre, class: "unseen",
    }),
    el("line", { x1: cx, y1: cy, x2: tip[0], y2: tip[1], class: isNew ? "hand new" : "hand" }),
    isNew ? mark(tip) : el("circle", { cx: tip[0], cy: tip[1], r: 6, class: "knob" }),
    below(0, "turn.every", { n: short(TURN / freq[pair]) }, "small"),
    isNew ? below(1, "turn.new", {}, "small new") : below(1, "turn.turns", { n: number(turned / TURN, 2) }, "small"));
}

const mark = ([x, y]) =>
  el("path", { d: `M${x},${y - 7}L${x + 7},${y}L${x},${y + 7}L${x - 7},${y}Z`, class: "knob new" });

function draw(width) {
  const freq = speeds();
  const cell = width / 4;
  const radius = Math.min(cell * 0.36, 78);
  const tall = 2 * radius + 74;
  const children = shownPairs().map((pair, i) =>
    dial(pair, freq, {
      cx: (i % 4) * cell + cell / 2, cy: Math.floor(i / 4) * tall + radius + 26, radius,
    }));
  return { children, height: Math.ceil(children.length / 4) * tall, role: "group", says: t("turn.caption") };
}

// Let a pointer take a hand: the position follows how far it goes around. One round of the pointer
// is at most the whole range, or a slow hand would run through it at a touch.
function draggable(holder) {
  let held = null;
  const angle = (event, box) =>
    Math.atan2(event.clientX - box.left - box.width / 2, box.top + box.height / 2 - event.clientY);
  holder.addEventListener("pointerdown", (event) => {
    const taken = event.target.closest("[data-pair]");
    if (!taken) return;
    event.preventDefault();
    holder.setPointerCapture(event.pointerId);
    const box = taken.querySelector(".dial").getBoundingClientRect();
    const freq = speeds()[Number(taken.dataset.pair)];
    held = { box, from: angle(event, box), tokens: position(), perRadian: Math.min(1 / freq, last() / TURN) };
    taken.focus({ preventScroll: true });
  });
  holder.addEventListener("pointermove", (event) => {
    if (!held) return;
    const now = angle(event, held.box);
    const gone = now - held.from;
    const around = gone - TURN * Math.round(gone / TURN);
    held.from = now;
    held.tokens = Math.min(Math.max(held.tokens + around * held.perRadian, 0), last());
    moveTo(held.tokens);
  });
  // A finger on a hand turns it and scrolls nothing.
  const hold = (event) => event.target.closest("[data-pair]") && event.preventDefault();
  holder.addEventListener("touchstart", hold, { passive: false });
  const release = () => {
    held = null;
  };
  holder.addEventListener("pointerup", release);
  holder.addEventListener("pointercancel", release);
  holder.addEventListener("keydown", (event) => {
    if (!event.target.closest("[data-pair]") || !(event.key in KEYS)) return;
    event.preventDefault();
    moveTo(position() + KEYS[event.key] * (isNear() ? 1 : Math.ceil(last() / 400)));
  });
}

function said() {
  const at = whole(position());
  const freq = speeds();
  if (isNear()) {
    const turns = (pair) => number((position() * freq[pair]) / TURN, 2);
    const slowest = freq.length - 1;
    const share = number(100 * sameScore(freq, position()), 2).replace("-", "−");
    return t("turn.near", { position: at, first: turns(0), last: turns(slowest), slowest, share });
  }
  const pairs = freq.map((_, pair) => stand(pair, freq)).filter(({ isNew }) => isNew).length;
  const { original } = settings();
  const first = firstNewToken(freq, settings());
  if (position() <= original) return t("turn.within", { position: at, original: whole(original) });
  return t(first === null ? "turn.known" : "turn.past", {
    position: at, original: whole(original), new: pairs, pairs: freq.length, first: whole(first ?? 0),
  });
}

export function turning() {
  const dials = figure(() => t("turn.title"), draw);
  draggable(dials.node);
  const where = el("p", { class: "finding" });
  const shown = el("div", { class: "shown-while" }, where, dials.node);
  let running = null;
  const button = el("button", { type: "button", class: "action", onclick: () => (running ? stop() : play()) });
  const stop = () => {
    cancelAnimationFrame(running);
    running = null;
    update({});
  };
  const play = () => {
    const target = last();
    const from = position() >= target ? 0 : position();
    let start = null;
    const tick = (now) => {
      start ??= now;
      const next = from + ((now - start) / 1000 / SECONDS[state.range]) * target;
      update({ position: Math.round(Math.min(next, target)) });
      if (next < target) running = requestAnimationFrame(tick);
      else running = null;
    };
    running = requestAnimationFrame(tick);
  };
  const line = el("div", { class: "controls play" });
  const ranges = choice("range", ["near", "far"], (name) => t(`turn.${name}range`), "turn.legend");
  const scalings = scalingChoice();
  let length = 0;
  const render = () => {
    if (length !== last()) {
      // The slider's range follows the lengths of the panel below.
      length = last();
      const each = steps.whole(0, isNear() ? FEW_TOKENS : 400).map((i) => Math.round((length * i) / (isNear() ? FEW_TOKENS : 400)));
      line.replaceChildren(slider("position", each, () => whole(position())), button);
    }
    scalings.hidden = isNear();
    button.textContent = t(running ? "turn.stop" : "turn.play");
    where.textContent = said();
    // Drawn anew, a hand keeps the keyboard's focus.
    const focused = document.activeElement?.getAttribute?.("data-pair");
    dials.render();
    if (focused !== null && focused !== undefined)
      dials.node.querySelector(`[data-pair="${focused}"]`)?.focus({ preventScroll: true });
  };
  return { node: [el("div", { class: "stage" }, shown, line, ranges, scalings)], render };
}
