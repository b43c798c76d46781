// Sliders, choices and switches, all of the browser's own kind, so that keys and touch work.

import { el } from "./draw.js";
import { onChange, state, update } from "./state.js";
import { t } from "./words.js";

let count = 0;

// A slider over the values of `steps`; what a link or a config says between two of them is shown
// as it is.
export function slider(key, steps, format, label = `control.${key}`) {
  const id = `s${count++}`;
  const nearest = () =>
    steps.reduce((best, x, i) => (Math.abs(x - state[key]) < Math.abs(steps[best] - state[key]) ? i : best), 0);
  const input = el("input", {
    type: "range", id, min: 0, max: steps.length - 1, step: 1, "data-key": key,
    oninput: () => update({ [key]: steps[Number(input.value)] }),
  });
  const output = el("output", { for: id });
  const name = el("label", { for: id });
  const show = () => {
    name.textContent = t(label);
    input.value = nearest();
    output.textContent = format(state[key]);
    input.setAttribute("aria-valuetext", output.textContent);
  };
  onChange(show);
  show();
  return el("div", { class: "slider" }, name, output, input);
}

// One of several, as a row of labels.
export function choice(key, values, label, legend, usable = () => true) {
  const group = `c${count++}`;
  const title = el("legend", {});
  const items = values.map((value) => {
    const input = el("input", {
      type: "radio", name: group, value, "data-key": key, onchange: () => update({ [key]: value }),
    });
    const text = el("span", {});
    return { value, input, text, node: el("label", { class: "chip" }, input, text) };
  });
  const show = () => {
    title.textContent = t(legend);
    for (const { value, input, text } of items) {
      text.textContent = label(value);
      input.checked = state[key] === value;
      input.disabled = !usable(value);
    }
  };
  onChange(show);
  show();
  return el("fieldset", { class: "choice" }, title, items.map(({ node }) => node));
}

export function toggle(key, label, on = 1) {
  const input = el("input", {
    type: "checkbox", "data-key": key, onchange: () => update({ [key]: input.checked ? on : 0 }),
  });
  const text = el("span", {});
  const show = () => {
    text.textContent = t(label);
    input.checked = Boolean(state[key]);
  };
  onChange(show);
  show();
  return el("label", { class: "chip" }, input, text);
}

export const steps = {
  geometric: (low, ratio, high) => {
    const found = [];
    for (let x = low; x <= high * 1.0001; x *= ratio) found.push(Number(x.toPrecision(6)));
    return found;
  },
  whole: (low, high, step = 1) =>
    Array.from({ length: Math.floor((high - low) / step) + 1 }, (_, i) => low + i * step),
};
