// ALiBi's slopes, T5's buckets, FIRE's curve.

import { scaleLinear, scaleLog, scaleSymlog } from "d3-scale";
import { line } from "d3-shape";
import { slider, steps, toggle } from "../controls.js";
import { apart, el, figure, number, short, whole, xAxis, yAxis } from "../draw.js";
import { bucketEdges, fireShare, slopes } from "../formulas.js";
import { state } from "../state.js";
import { t } from "../words.js";

const HEIGHT = 250, TOP = 34;

function alibi(width) {
  const left = 40, right = width - 60, far = 1024;
  const x = scaleLinear([0, far], [left, right]), y = scaleLinear([-12, 0], [HEIGHT, TOP]);
  const all = slopes(state.heads);
  const ends = all.map((slope) => {
    const to = Math.min(far, 12 / slope);
    return { slope, to, y: y(-slope * to) + 4 };
  });
  const inside = ends.filter((e) => e.to === far).slice(-6);
  return {
    height: HEIGHT + 44,
    says: t("alibi.says", {
      first: number(Math.max(...all), 3), last: number(Math.min(...all), 3), heads: state.heads,
      near: number(Math.LN2 / Math.max(...all), 3), far: whole(Math.LN2 / Math.min(...all)),
    }),
    children: [
      yAxis(y, [0, -4, -8, -12], (v) => String(v).replace("-", "−"), left, right, t("bias.logits")),
      xAxis(x, [0, 256, 512, 768, 1024], whole, HEIGHT, HEIGHT, t("bias.distance")),
      ends.map(({ slope, to }) => el("path", { d: `M${x(0)},${y(0)}L${x(to)},${y(-slope * to)}`, class: "main thin" })),
      apart(inside, 14, TOP, HEIGHT).map(({ slope, at }) =>
        el("text", { x: right + 6, y: at, class: "small" }, number(slope, 2))),
    ],
  };
}

function t5(width) {
  const left = 40, right = width - 20;
  const side = state.bidirectional ? state.buckets / 2 : state.buckets;
  const furthest = Math.max(state.furthest, Math.floor(side / 2) + 1);
  const edges = [0, ...bucketEdges(side, furthest)];
  const x = scaleSymlog([0, 1024], [left, right]).constant(4), y = scaleLinear([0, side - 1], [HEIGHT, TOP]);
  const points = edges.flatMap((edge, bucket) => [[edge, bucket], [edges[bucket + 1] ?? 1024, bucket]]);
  return {
    height: HEIGHT + 44,
    says: t("t5.says", { exact: Math.floor(side / 2), last: whole(edges.at(-1)), buckets: side }),
    children: [
      yAxis(y, y.ticks(4).filter(Number.isInteger), String, left, right, t("t5.bucket")),
      xAxis(x, [0, 4, 16, 64, 256, 1024], whole, HEIGHT, HEIGHT, t("bias.distance")),
      el("path", { d: line(([a]) => x(a), ([, b]) => y(b))(points), class: "main" }),
      edges.map((edge, bucket) => el("circle", { cx: x(edge), cy: y(bucket), r: 2.5, class: "whole" })),
    ],
  };
}

function fire(width) {
  const left = 40, right = width - 72, far = 8192;
  const x = scaleLog([1, far], [left, right]), y = scaleLinear([0, 1], [HEIGHT, TOP]);
  const queries = [64, 512, 2048, 8192];
  const curves = queries.map((query) => {
    const points = steps.geometric(1, 1.15, query * 0.999).concat(query);
    return { query, points, y: y(fireShare(query, query, state.firec, state.threshold)) + 4 };
  });
  const path = (query) => line((d) => x(d), (d) => y(fireShare(d, query, state.firec, state.threshold)));
  return {
    height: HEIGHT + 44,
    says: t("fire.says", { n: whole(state.threshold) }),
    children: [
      yAxis(y, [0, 0.5, 1], String, left, right, t("fire.share")),
      xAxis(x, [1, 10, 100, 1000], whole, HEIGHT, HEIGHT, t("bias.distance")),
      curves.map(({ query, points }) => el("path", { d: path(query)(points), class: "main thin" })),
      apart(
        curves.map(({ query, y: own }) => ({ query, y: own })), 14, TOP + 4, HEIGHT,
      ).map(({ query, at }) => el("text", { x: right + 6, y: at, class: "small" }, t("fire.query", { n: whole(query) }))),
    ],
  };
}

export function biases() {
  const figures = [
    figure(() => t("alibi.title"), alibi), figure(() => t("t5.title"), t5), figure(() => t("fire.title"), fire),
  ];
  const title = ["alibi", "t5", "fire"].map((name) => {
    const node = el("h3", {});
    return { node, show: () => (node.textContent = t(`${name}.title`)) };
  });
  const controls = [
    [slider("heads", [1, 2, 4, 6, 8, 12, 16, 24, 32, 40, 64], String)],
    [slider("buckets", [8, 16, 32, 64], String), slider("furthest", [64, 128, 256, 512, 1024], whole), toggle("bidirectional", "t5.both")],
    [slider("firec", [0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10], String), slider("threshold", [1, 64, 128, 256, 512, 1024, 2048, 4096, 8192], whole)],
  ];
  const node = el("div", { class: "three" }, figures.map((each, i) =>
    el("div", { class: "stage" }, title[i].node, el("div", { class: "shown-while" }, each.node),
      el("div", { class: "controls" }, controls[i]))));
  const render = () => {
    title.forEach((each) => each.show());
    figures.forEach((each) => each.render());
  };
  return { node: [node], render };
}
