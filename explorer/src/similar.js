// Python's difflib, as the doctor uses it to find the key that a misspelled one was meant for.

// The first longest block that two texts share between these bounds: [start in a, in b, length].
function longest(a, b, [aLow, aHigh, bLow, bHigh]) {
  let best = [aLow, bLow, 0];
  let before = new Map();
  for (let i = aLow; i < aHigh; i++) {
    const ends = new Map();
    for (let j = bLow; j < bHigh; j++) {
      if (a[i] !== b[j]) continue;
      const size = (before.get(j - 1) ?? 0) + 1;
      ends.set(j, size);
      if (size > best[2]) best = [i - size + 1, j - size + 1, size];
    }
    before = ends;
  }
  return best;
}

export function ratio(a, b) {
  const matched = ([aLow, aHigh, bLow, bHigh]) => {
    const [i, j, size] = longest(a, b, [aLow, aHigh, bLow, bHigh]);
    return size && size + matched([aLow, i, bLow, j]) + matched([i + size, aHigh, j + size, bHigh]);
  };
  return a.length + b.length ? (2 * matched([0, a.length, 0, b.length])) / (a.length + b.length) : 1;
}

// The nearest of `keys`, with letters and digits compared only; "" if none is near enough.
export function nearest(key, keys, cutoff) {
  const plain = (name) => name.toLowerCase().replace(/[^a-z0-9]/g, "");
  const spelled = new Map(keys.map((known) => [plain(known), known]));
  let best = [cutoff, ""];
  for (const known of key.length < 200 ? spelled.keys() : []) {
    const score = ratio(known, plain(key));
    if (score > best[0] || (score === best[0] && known > best[1])) best = [score, known];
  }
  return spelled.get(best[1]) ?? "";
}
