"""The generated page has every rule and every runtime."""

from posenc.dialects.runtimes import RUNTIMES
from posenc.doctor.reference import markdown
from posenc.doctor.rules import RULES


def test_the_page_is_complete():
    text = markdown()
    for code, rule in RULES.items():
        assert text.count(f"### {code}: {rule.title}") == 1
        assert rule.evidence in text and rule.cure in text
    for name in RUNTIMES:
        assert f"| {name} |" in text
