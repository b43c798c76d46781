// Mean score by distance for eight encodings, as posenc measures it.

import { scaleLinear, scaleSymlog } from "d3-scale";
import { area, line } from "d3-shape";
import { choice } from "../controls.js";
import data from "../data.json";
import { el, figure, number, whole } from "../draw.js";
import { state } from "../state.js";
import { t } from "../words.js";

const { distances, encodings, train_length, head_dim, heads } = data.scores;
const LOW = -20, HIGH = 8;

function draw(width) {
  const columns = width < 560 ? 2 : 4;
  const names = Object.keys(encodings);
  const gap = 20, left = 34;
  const cell = (width - left - gap * (columns - 1)) / columns;
  const tall = 186, top = 32, inner = 116;
  const children = names.map((name, i) => {
    const found = encodings[name];
    const values = found[state.pairs];
    const change = (v) => v - values[0];
    const x0 = left + (i % columns) * (cell + gap), y0 = Math.floor(i / columns) * tall + top;
    const x = scaleSymlog([0, train_length], [x0, x0 + cell]).constant(1);
    const y = scaleLinear([LOW, HIGH], [y0 + inner, y0]).clamp(true);
    const path = line((v, k) => x(distances[k]), (v) => y(change(v)));
    const band = area((v, k) => x(distances[k]), (v, k) => y(change(found.low[k])), (v, k) => y(change(found.high[k])));
    const last = change(values.at(-1));
    const below = last < LOW;
    const first = i % columns === 0;
    return el("g", {},
      el("text", { x: x0, y: y0 - 10, class: "name chosen" }, t(`encoding.${name}`)),
      el("line", { x1: x0, x2: x0 + cell, y1: y(0), y2: y(0), class: "zero" }),
      [LOW, -10, 0].map((v) => [
        v ? el("line", { x1: x0, x2: x0 + cell, y1: y(v), y2: y(v), class: "grid" }) : null,
        first && el("text", { x: x0 - 6, y: y(v) + 4, "text-anchor": "end", class: "small" }, String(v).replace("-", "−")),
      ]).flat(),
      state.pairs === "mean" && el("path", { d: band(values), class: "band" }),
      el("path", { d: path(values), class: "main" }),
      [1, 32, 512].map((d) =>
        el("text", { x: x(d), y: y0 + inner + 17, "text-anchor": "middle", class: "small" }, String(d))),
      el("text", {
        x: x0 + cell, y: y0 - 10, "text-anchor": "end", class: below ? "small new" : "small",
      }, `${below ? "↓ " : ""}${number(Number(last.toFixed(1))).replace("-", "−")}`));
  });
  return {
    children, height: Math.ceil(names.length / columns) * tall,
    says: t("scores.caption", { heads, dim: head_dim, length: whole(train_length) }),
  };
}

export function scores() {
  const chart = figure(() => t("scores.title"), draw);
  const about = el("p", { class: "method" });
  const pick = choice("pairs", ["same", "mean"], (name) => t(`scores.${name}`), "scores.legend");
  const render = () => {
    about.textContent = t(`scores.about.${state.pairs}`);
    chart.render();
  };
  return { node: [pick, about, chart.node], render };
}
