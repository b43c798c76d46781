// Masks by clicking: who sees whom among sixteen tokens.

import { slider, steps, toggle } from "../controls.js";
import { el } from "../draw.js";
import { sees } from "../formulas.js";
import { state, update } from "../state.js";
import { t } from "../words.js";

export const TOKENS = 16;

export const starts = () =>
  new Set(state.docs.split(",").map(Number).filter((i) => Number.isInteger(i) && i > 0 && i < TOKENS));

export function documents() {
  const begin = starts();
  let id = 0;
  return Array.from({ length: TOKENS }, (_, i) => (begin.has(i) ? ++id : id));
}

export const mask = () => ({
  causal: state.causal, window: state.window, prefix: state.prefix,
  documents: starts().size ? documents() : null,
});

// The lines of Python that makes this mask.
export function code() {
  const m = mask();
  const parts = [];
  if (m.causal) parts.push(m.prefix ? `(masks.causal | masks.prefix(${m.prefix}))` : "masks.causal");
  if (m.window) parts.push(`masks.sliding_window(${m.window})`);
  if (m.documents) parts.push(`masks.document(torch.tensor([${m.documents.join(", ")}]))`);
  return `from posenc import masks\n\nmask = ${parts.join(" & ") || "masks.full"}`;
}

export function masks() {
  const grid = el("div", { class: "mask", role: "grid" });
  const line = el("pre", {}, "");
  const about = el("p", { class: "finding", "aria-live": "polite" });
  const hint = el("p", { class: "method" });
  let query = TOKENS - 1;
  const heads = Array.from({ length: TOKENS }, (_, i) =>
    el("button", { type: "button", class: "token", onclick: () => flip(i) }, String(i)));
  heads[0].disabled = true;
  const flip = (i) => {
    const begin = starts();
    if (!begin.delete(i)) begin.add(i);
    update({ docs: [...begin].sort((a, b) => a - b).join(",") });
  };
  const rows = Array.from({ length: TOKENS }, (_, q) => {
    const choose = () => {
      query = q;
      render();
    };
    const name = el("button", { type: "button", class: "row", onclick: choose, onfocus: choose }, String(q));
    const cells = Array.from({ length: TOKENS }, () => el("span", { role: "gridcell", onclick: choose, onpointerenter: choose }));
    return { name, cells };
  });
  const row = (...cells) => el("div", { role: "row" }, ...cells);
  grid.append(
    row(el("span", { class: "corner", role: "columnheader" }), heads.map((h) => el("span", { role: "columnheader" }, h))),
    ...rows.map(({ name, cells }) => row(el("span", { role: "rowheader" }, name), cells)),
  );
  const render = () => {
    const m = mask();
    const ids = documents();
    grid.setAttribute("aria-label", t("mask.title"));
    heads.forEach((head, i) => {
      head.setAttribute("aria-pressed", starts().has(i));
      head.setAttribute("aria-label", t("mask.begin", { n: i }));
      head.classList.toggle("odd", ids[i] % 2 === 1);
    });
    rows.forEach(({ name, cells }, q) => {
      name.setAttribute("aria-label", t("mask.query", { n: q }));
      name.setAttribute("aria-pressed", q === query);
      cells.forEach((cell, k) => {
        const seen = sees(q, k, m);
        cell.className = `${seen ? "sees" : "blind"}${q === query ? " asked" : ""}`;
      });
    });
    const keys = ids.map((_, k) => k).filter((k) => sees(query, k, m));
    about.textContent = t(keys.length ? "mask.sees" : "mask.none", { query, keys: spans(keys), count: keys.length });
    hint.textContent = t("mask.hint");
    line.textContent = code();
  };
  const tools = el("div", { class: "controls" },
    toggle("causal", "mask.causal"),
    slider("window", steps.whole(0, TOKENS), (n) => (n ? String(n) : t("mask.off")), "mask.window"),
    slider("prefix", steps.whole(0, TOKENS), (n) => (n ? String(n) : t("mask.off")), "mask.prefix"));
  const side = el("div", {}, tools, hint, about, line);
  const shown = el("div", { class: "drawing shown-while" }, grid);
  return { node: [el("div", { class: "two stage" }, shown, side)], render };
}

// 0, 1, 2, 5 as "0–2, 5".
function spans(keys) {
  const found = [];
  for (const k of keys) {
    const last = found.at(-1);
    if (last && k === last[1] + 1) last[1] = k;
    else found.push([k, k]);
  }
  return found.map(([a, b]) => (a === b ? a : `${a}–${b}`)).join(", ");
}
