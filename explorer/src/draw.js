// Small helpers to build elements and charts; text only ever enters as text.

const SVG = "http://www.w3.org/2000/svg";
const SVG_TAGS = new Set(
  "svg g path line rect circle text tspan title desc defs pattern clipPath".split(" "),
);

export function el(tag, attributes = {}, ...children) {
  const node = SVG_TAGS.has(tag) ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((child) => child || child === ""));
  return node;
}

export const number = (x, digits = 3) => {
  const text = x.toLocaleString("en-US", { maximumSignificantDigits: digits });
  return Math.abs(x) >= 1e15 ? x.toExponential(1) : text;
};
export const whole = (x) => Math.round(x).toLocaleString("en-US");
export const short = (x) => {
  for (const [size, letter] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]])
    if (x >= size) return `${number(x / size)}${letter}`;
  return number(x);
};

// A figure that is drawn anew when its width changes. draw(width) returns the svg's children and
// height.
export function figure(title, draw) {
  const holder = el("div", { class: "drawing" });
  const caption = el("figcaption");
  const node = el("figure", {}, holder, caption);
  let drawn = 0;
  const render = () => {
    const width = Math.floor(holder.clientWidth);
    if (!width) return;
    drawn = width;
    const { children, height, says, role } = draw(width);
    const svg = el(
      "svg",
      { viewBox: `0 0 ${width} ${height}`, width, height, role: role ?? "img" },
      el("title", {}, title()), children,
    );
    holder.replaceChildren(svg);
    if (says !== undefined) caption.replaceChildren(...[says].flat());
  };
  new ResizeObserver(() => Math.abs(holder.clientWidth - drawn) > 1 && render()).observe(holder);
  return { node, render };
}

// Axes as quiet as they can be: grid lines and numbers.
export function xAxis(scale, ticks, format, y0, y1, label) {
  const [a, b] = scale.range();
  return el(
    "g", { class: "axis" },
    ticks.map((t) => el("line", { x1: scale(t), x2: scale(t), y1: y0, y2: y1, class: "grid" })),
    ticks.map((t) => el("text", { x: scale(t), y: y1 + 16, "text-anchor": "middle" }, format(t))),
    label && el("text", { x: (a + b) / 2, y: y1 + 35, "text-anchor": "middle", class: "label" }, label),
  );
}

export function yAxis(scale, ticks, format, x0, x1, label) {
  const top = Math.min(...scale.range());
  return el(
    "g", { class: "axis" },
    ticks.map((t) => el("line", { x1: x0, x2: x1, y1: scale(t), y2: scale(t), class: "grid" })),
    ticks.map((t) => el("text", { x: x0 - 8, y: scale(t) + 4, "text-anchor": "end" }, format(t))),
    label && el("text", { x: 0, y: top - 14, class: "label" }, label),
  );
}

// Move labels apart: [{y, ...}] sorted by y, each at least `gap` below the one above.
export function apart(labels, gap, low, high) {
  const sorted = [...labels].sort((a, b) => a.y - b.y);
  sorted.forEach((label, i) => {
    label.at = Math.max(label.y, i ? sorted[i - 1].at + gap : low);
  });
  for (let i = sorted.length - 1, limit = high; i >= 0; i--) {
    sorted[i].at = Math.min(sorted[i].at, limit);
    limit = sorted[i].at - gap;
  }
  return sorted;
}

export const powers = (low, high) => {
  const found = [];
  for (let e = Math.ceil(Math.log10(low) - 1e-9); 10 ** e <= high * 1.000001; e++) found.push(10 ** e);
  return found;
};
