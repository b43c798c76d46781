// Error of angles where position, frequency and their product are kept in 16 bits.

import { scaleLog } from "d3-scale";
import { line } from "d3-shape";
import { apart, el, figure, number, powers, short, whole, xAxis, yAxis } from "../draw.js";
import { DTYPES, angleError, plain } from "../formulas.js";
import { state } from "../state.js";
import { t } from "../words.js";

const FAR = 2 ** 20;
// Odd positions: every format represents powers of two exactly.
export const POSITIONS = [...new Set(Array.from({ length: 81 }, (_, i) => Math.floor(2 ** (i / 4)) | 1))];

export const errors = (dtype) => {
  const freq = plain(state.dim, state.base);
  return POSITIONS.map((p) => angleError(p, freq, dtype));
};

function draw(width) {
  const left = 52, right = width - 76, top = 34, bottom = 300;
  const x = scaleLog([1, FAR], [left, right]);
  const y = scaleLog([1e-8, Math.PI], [bottom, top]).clamp(true);
  const curves = Object.keys(DTYPES).map((dtype) => {
    const points = errors(dtype)
      .map((e, i) => (e === null ? null : [POSITIONS[i], Math.max(e, 1e-8)]))
      .filter(Boolean);
    return { dtype, points };
  });
  const path = line(([p]) => x(p), ([, e]) => y(e));
  const labels = apart(
    curves.map(({ dtype, points }) => ({ dtype, y: y(points.at(-1)[1]) + 4, x: x(points.at(-1)[0]) })),
    16, top + 4, bottom,
  );
  return {
    height: bottom + 44,
    says: t("round.says", { dim: state.dim, base: whole(state.base) }),
    children: [
      yAxis(y, [1e-8, 1e-6, 1e-4, 1e-2, 1], (v) => (v < 0.01 ? v.toExponential(0).replace("-", "−") : number(v)), left, right, t("round.y")),
      xAxis(x, powers(1, FAR), short, bottom, bottom, t("round.x")),
      el("line", { x1: left, x2: right, y1: y(Math.PI), y2: y(Math.PI), class: "reference" }),
      state.original < FAR && [
        el("line", { x1: x(state.original), x2: x(state.original), y1: top, y2: bottom, class: "reference" }),
        el("text", { x: x(state.original) + 5, y: bottom - 8, class: "reference-label" }, t("round.length")),
      ],
      curves.map(({ dtype, points }, i) => el("path", { d: path(points), class: `main curve${i}` })),
      el("text", { x: left + 6, y: y(Math.PI) + 15, class: "reference-label" }, t("round.half")),
      labels.map(({ dtype, at }, i) => el("text", { x: right + 8, y: at, class: `name curve-name${Object.keys(DTYPES).indexOf(dtype)}` }, dtype)),
    ].flat(),
  };
}

export function rounding() {
  const chart = figure(() => t("round.title"), draw);
  const finding = el("p", { class: "finding" });
  const render = () => {
    const freq = plain(state.dim, state.base);
    const at = state.original | 1;
    const error = angleError(at, freq, "bfloat16");
    finding.textContent = t("round.finding", {
      position: whole(at), degrees: number((error * 180) / Math.PI, 2),
    });
    chart.render();
  };
  return { node: [finding, chart.node], render };
}
