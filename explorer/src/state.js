// What the page shows, kept in the address, so that a link reproduces the view.

export const DEFAULTS = {
  lang: "",
  base: 10000, factor: 8, dim: 128, original: 4096, scaling: "none",
  position: 12, range: "near", pairs: "same",
  heads: 8, buckets: 32, furthest: 128, bidirectional: 0, firec: 0.1, threshold: 512,
  causal: 1, window: 0, prefix: 0, docs: "",
  config: "", sentence: "", positions: "nope",
};
const LIMITS = {
  base: [100, 1e9], factor: [1, 128], dim: [8, 512], original: [64, 1 << 20], position: [0, 2 ** 27],
  heads: [1, 64], buckets: [4, 64], furthest: [33, 1024], bidirectional: [0, 1],
  firec: [0.001, 10], threshold: [1, 8192], causal: [0, 1], window: [0, 16], prefix: [0, 16],
};
const CHOICES = {
  lang: ["en", "zh"], range: ["near", "far"], pairs: ["same", "mean"], positions: ["nope", "rope", "alibi"],
  scaling: ["none", "linear", "ntk", "dynamic", "byparts", "yarn", "llama3", "longrope"],
};
const LONGEST_TEXT_IN_LINK = 6000;
const TEXTS = ["config", "sentence"];

export const state = { ...DEFAULTS };
const listeners = [];
let waiting = false;

export const onChange = (listener) => listeners.push(listener);

export function update(patch) {
  Object.assign(state, patch);
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => {
    waiting = false;
    writeLink();
    for (const listener of listeners) listener(state);
  });
}

const encode = (text) =>
  btoa(String.fromCharCode(...new TextEncoder().encode(text)))
    .replace(/\+/g, "-").replace(/\//g, "_").replace(/=+$/, "");
const decode = (text) => {
  const raw = atob(text.replace(/-/g, "+").replace(/_/g, "/"));
  return new TextDecoder().decode(Uint8Array.from(raw, (c) => c.charCodeAt(0)));
};

// True if a text is too long for a link, which then leaves it out.
export const isCut = () => TEXTS.some((key) => state[key].length > LONGEST_TEXT_IN_LINK);

// The part of an address that reproduces the view, on any copy of the page.
export function fragment() {
  const changed = Object.keys(DEFAULTS).filter((key) => state[key] !== DEFAULTS[key]);
  const said = changed
    .filter((key) => !TEXTS.includes(key) || state[key].length <= LONGEST_TEXT_IN_LINK)
    .map((key) => `${key}=${TEXTS.includes(key) ? encode(state[key]) : state[key]}`);
  return `#${said.join("&")}`;
}

function writeLink() {
  try {
    history.replaceState(null, "", fragment());
  } catch {
    // Some browsers refuse it for files; the link then stays as it was.
  }
}

// Read the address; what is no value of its kind is left as it was.
export function readLink(hash) {
  const found = {};
  for (const part of hash.replace(/^#/, "").split("&")) {
    const at = part.indexOf("=");
    const key = part.slice(0, at);
    const value = part.slice(at + 1);
    if (!Object.hasOwn(DEFAULTS, key)) continue;
    if (TEXTS.includes(key)) {
      try {
        found[key] = decode(value);
      } catch {
        continue;
      }
    } else if (typeof DEFAULTS[key] === "number") {
      const number = Number(value);
      if (value === "" || !Number.isFinite(number)) continue;
      const [low, high] = LIMITS[key];
      const whole = key === "firec" || key === "base" || key === "factor" ? number : Math.round(number);
      found[key] = Math.min(Math.max(whole, low), high);
      if (key === "dim" || key === "buckets") found[key] -= found[key] % 2;
    } else if (CHOICES[key]?.includes(value) || (key === "docs" && /^[\d,]*$/.test(value)))
      found[key] = value;
  }
  return found;
}
