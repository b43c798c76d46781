"""Split text into the terms by which the site is searched, English and Chinese.

Chinese has no blanks between words. Its terms are single characters and pairs of neighbours, so
that any text of two or more characters is found in every page that has its pairs. docs/conf.py
gives both splitters to Sphinx: this one reads the pages, the other one reads what a visitor types.
"""

import re

_CHINESE = "[\u3400-\u9fff]"
_PARTS = re.compile(rf"{_CHINESE}+|(?:(?!{_CHINESE})\w)+")


def terms_of(text: str) -> list[str]:
    """Return the terms of a text.

    >>> terms_of("RoPE 的外推")
    ['RoPE', '的', '外', '推', '的外', '外推']
    """
    terms = []
    for part in _PARTS.findall(text):
        if not re.match(_CHINESE, part):
            terms.append(part)
            continue
        terms += part
        terms += [part[i : i + 2] for i in range(len(part) - 1)]
    return terms


SPLIT_QUERY = r"""
function splitQuery(query) {
  const terms = [];
  const parts = query.match(/[\u3400-\u9fff]+|(?:(?![\u3400-\u9fff])[\p{Letter}\p{Number}_])+/gu);
  for (const part of parts || []) {
    if (!part.match(/^[\u3400-\u9fff]/)) {
      terms.push(part);
    } else if (part.length == 1) {
      terms.push(part);
    } else {
      [...part].forEach(function (character, i) {
        if (i % 2 || i == part.length - 1) terms.push(part[i - 1] + character);
      });
    }
  }
  return terms;
}
"""
"""The same for a query, in JavaScript. All of its terms must be found, so of Chinese it takes only
every second pair, most often a word, and the last one; or a single character. It has none of & < >
and quotes, which Sphinx's template escapes."""
