// What a reader cannot read on this page, one sentence each.
() => {
  const found = [];
  const screen = document.documentElement.clientWidth;
  const name = text => `"${text.trim().replace(/\s+/g, ' ').slice(0, 40)}"`;
  const scrolls = e => ['auto', 'scroll'].includes(getComputedStyle(e).overflowX);
  const above = e => {
    const all = [];
    for (let p = e; p && p !== document.documentElement; p = p.parentElement) all.push(p);
    return all;
  };
  const channels = colour => (colour.match(/[\d.]+/g) || []).map(Number);
  const luminance = rgb => rgb.slice(0, 3).map(c => c / 255)
    .map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const contrast = (a, b) => {
    const [low, high] = [luminance(channels(a)), luminance(channels(b))].sort((x, y) => x - y);
    return (high + 0.05) / (low + 0.05);
  };
  const behind = e => above(e).map(p => getComputedStyle(p).backgroundColor)
    .find(c => (channels(c)[3] ?? 1) > 0.5) || 'rgb(255,255,255)';
  const hides = value => value === 'hidden' || value === 'clip';

  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const node = texts.currentNode, home = node.parentElement;
    if (!node.data.trim() || home.closest('svg, script, style')) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    const boxes = [...range.getClientRects()];
    const chain = above(home);
    for (const p of chain) {
      const style = getComputedStyle(p), edge = p.getBoundingClientRect();
      if (hides(style.overflowX) && boxes.some(b => b.right > edge.right + 1))
        found.push(`${name(node.data)} is cut off at the side`);
      if (hides(style.overflowY) && boxes.some(b => b.bottom > edge.bottom + 1))
        found.push(`${name(node.data)} is cut off below`);
      if (scrolls(p)) break;
    }
    if (!chain.some(scrolls) && boxes.some(b => b.right > screen + 1 || b.left < -1))
      found.push(`${name(node.data)} stands outside the page`);
    const ratio = contrast(getComputedStyle(home).color, behind(home));
    if (ratio < 4.5) found.push(`${name(node.data)} is faint: contrast ${ratio.toFixed(1)}`);
  }

  for (const box of [...document.querySelectorAll('body *')].filter(scrolls)) {
    const edge = box.getBoundingClientRect();
    if (edge.right > screen + 1) found.push('something that scrolls is wider than the page');
    if (box.scrollWidth <= box.clientWidth + 1) continue;
    const fixed = [...box.querySelectorAll('tbody th')].map(e => e.getBoundingClientRect().width);
    if (Math.max(0, ...fixed) > 0.5 * box.clientWidth)
      found.push('the first column of a table that scrolls hides over half of it');
  }

  for (const svg of document.querySelectorAll('figure svg')) {
    const edge = svg.getBoundingClientRect(), paper = behind(svg);
    const filled = [...svg.querySelectorAll('path')].filter(e => {
      const style = getComputedStyle(e);
      return style.fill !== 'none' && style.fillOpacity * style.opacity > 0.3 && !e.closest('defs');
    }).map(e => e.getBoundingClientRect());
    const words = [...svg.querySelectorAll('text')].filter(e => e.textContent.trim());
    const boxes = words.map(e => e.getBoundingClientRect());
    const images = [...svg.querySelectorAll('image')].map(e => e.getBoundingClientRect());
    const middle = (b, within) => {
      const x = (b.left + b.right) / 2, y = (b.top + b.bottom) / 2;
      return within.left < x && x < within.right && within.top < y && y < within.bottom;
    };
    const straight = words.map(e => {
      const m = e.getScreenCTM();
      return Math.abs(m.a * m.b) < 1e-6 && Math.abs(m.c * m.d) < 1e-6;
    });
    words.forEach((e, i) => {
      const b = boxes[i];
      if (b.left < edge.left - 1 || b.right > edge.right + 1 ||
          b.top < edge.top - 1 || b.bottom > edge.bottom + 1)
        found.push(`${name(e.textContent)} is cut off by its figure`);
      if (!images.some(image => middle(b, image))) {
        const ratio = contrast(getComputedStyle(e).fill, paper);
        if (ratio < 3) found.push(`${name(e.textContent)} is faint: contrast ${ratio.toFixed(1)}`);
        if (filled.some(path => middle(b, path)))
          found.push(`${name(e.textContent)} stands on a filled shape`);
      }
      for (let j = 0; j < i; j++) {
        if (!straight[i] || !straight[j]) continue;
        const width = Math.min(b.right, boxes[j].right) - Math.max(b.left, boxes[j].left);
        const height = Math.min(b.bottom, boxes[j].bottom) - Math.max(b.top, boxes[j].top);
        const least = Math.min(b.width * b.height, boxes[j].width * boxes[j].height);
        if (width > 0 && height > 0 && width * height > 0.2 * least)
          found.push(`${name(e.textContent)} is printed over ${name(words[j].textContent)}`);
      }
    });
  }
  return [...new Set(found)];
}
