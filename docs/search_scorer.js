// Which result of the site's search comes first: pages whose title has the words that were asked,
// and pages that explain before pages that list.
var Scorer = {
  score: ([docname, title, anchor, descr, score, filename]) => {
    const asked = splitQuery((new URLSearchParams(location.search).get("q") || "").toLowerCase());
    const inTitle = asked.filter((word) => title.toLowerCase().includes(word)).length;
    if (/^(learn|start)\//.test(filename)) return score + 3 * inTitle + 2;
    if (/^(api|rules|cards)\/|^(changelog|log|contributing|architecture)\./.test(filename)) return score - 4;
    return score + 3 * inTitle;
  },
  // As Sphinx has them.
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
