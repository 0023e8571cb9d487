"""The page's Markdown in headless Chromium: its elements, and that text stays text."""

import random
from collections.abc import Callable

import pytest
from playwright.sync_api import Page

pytest_plugins = ["tests.server.page_browser"]
Open = Callable[..., Page]
pytestmark = pytest.mark.browser

RENDER = """async (pieces) => {
  const { MarkdownView } = await import('./markdown.js');
  const host = document.createElement('div');
  const view = new MarkdownView(host);
  let text = '';
  for (const piece of pieces) view.update(text += piece);
  return host.innerHTML;
}"""

SAMPLE = """# Title *here*

Some **bold**, _emphasis_, `code`, ~~gone~~ and snake_case_names.
Second line of it.

1. one
2. two
   - nested **item**
   - another

     with a paragraph
3. three

- [x] done
- [ ] open

| name | count |
|:--|--:|
| `a|b` | 1 |
| two | 22 |

> quoted
> - list

```python
def f(): return "<b>"
```

---

Last [link](https://example.org/a_(b)) and https://example.org/x.
"""


def render(page: Page, *pieces: str) -> str:
    return page.evaluate(RENDER, list(pieces))


@pytest.fixture(scope="module")
def cases() -> list[tuple[str, str]]:
    return [
        ("plain", "<p>plain</p>"),
        ("a\nb", "<p>a\nb</p>"),
        ("a  \nb", "<p>a<br>b</p>"),
        ("# One", "<h2>One</h2>"),
        ("###### Six #", "<h6>Six</h6>"),
        ("#hashtag", "<p>#hashtag</p>"),
        ("**b** *i* _i_ ~~s~~", "<p><strong>b</strong> <em>i</em> <em>i</em> <s>s</s></p>"),
        ("***both***", "<p><strong><em>both</em></strong></p>"),
        ("a*b and 2 * 3 * 4", "<p>a*b and 2 * 3 * 4</p>"),
        ("snake_case_name __init__", "<p>snake_case_name <strong>init</strong></p>"),
        ("`a*b*` ``x`y``", "<p><code>a*b*</code> <code>x`y</code></p>"),
        (r"\*no\*", "<p>*no*</p>"),
        ("- a\n- b", "<ul><li>a</li><li>b</li></ul>"),
        ("3. a\n4. b", '<ol start="3"><li>a</li><li>b</li></ol>'),
        ("- a\n  - b\n- c", "<ul><li>a<ul><li>b</li></ul></li><li>c</li></ul>"),
        ("text\n- a", "<p>text</p><ul><li>a</li></ul>"),
        ("In\n1984. Yes", "<p>In\n1984. Yes</p>"),
        ("> a\n> b", "<blockquote><p>a\nb</p></blockquote>"),
        ("a\n\n---\n\nb", "<p>a</p><hr><p>b</p>"),
        ("<b>no</b> &amp;", "<p>&lt;b&gt;no&lt;/b&gt; &amp;amp;</p>"),
        ("[x](javascript:alert(1))", "<p><span>x</span></p>"),
        ("![a](data:text/html,x)", "<p><span>a</span></p>"),
    ]


def test_every_markdown_element(open_page: Open, cases: list[tuple[str, str]]) -> None:
    page = open_page()
    made = [(text, render(page, text).replace(' class=""', "")) for text, _ in cases]
    assert made == cases


def test_links_open_in_a_new_tab_without_referrer(open_page: Open) -> None:
    page = open_page()
    link = '<a href="{0}" target="_blank" rel="noopener noreferrer">{1}</a>'
    assert render(page, "[a b](https://x.org/y)") == f"<p>{link.format('https://x.org/y', 'a b')}</p>"
    assert (
        render(page, "see https://x.org/y.")
        == f"<p>see {link.format('https://x.org/y', 'https://x.org/y')}.</p>"
    )


def test_code_and_tables(open_page: Open) -> None:
    page = open_page()
    text = page.evaluate(
        """async (source) => {
          const { MarkdownView } = await import('./markdown.js');
          const host = document.createElement('div');
          new MarkdownView(host).update(source);
          return [host.querySelector('pre').textContent, host.querySelector('.code-head span').textContent,
                  [...host.querySelectorAll('td')].map(cell => cell.textContent),
                  host.querySelectorAll('th').length];
        }""",
        "```js\nif (a < b) {\n\n  return `x`;\n}\n```\n\n| a | b |\n|---|--:|\n| x \\| y | 2 |\n",
    )
    assert text == ["if (a < b) {\n\n  return `x`;\n}", "js", ["x | y", "2"], 2]


def test_an_unclosed_fence_is_code(open_page: Open) -> None:
    page = open_page()
    made = render(page, "```\n# not a title\n- nor a list")
    assert made.endswith("<code># not a title\n- nor a list</code></pre></div>")


def test_incremental_rendering_equals_rendering_at_once(open_page: Open) -> None:
    page = open_page()
    whole = render(page, SAMPLE)
    dice = random.Random(3)
    for size in (1, 3, 9, 40):
        pieces, offset = [], 0
        while offset < len(SAMPLE):
            step = dice.randint(1, size)
            pieces.append(SAMPLE[offset : offset + step])
            offset += step
        assert render(page, *pieces) == whole


def test_text_never_becomes_a_script_or_a_request(open_page: Open) -> None:
    page = open_page()
    hostile = [
        "<script>window.bad = 1</script>",
        '<img src="x" onerror="window.bad = 1">',
        "![x](https://elsewhere.example/pixel.png)",
        "[x](JaVaScRiPt:window.bad=1)",
        '[x](https://a.example/"onmouseover="window.bad=1)',
        "```html\n<img src=x onerror=window.bad=1>\n```",
        "| <svg onload=window.bad=1> | b |\n|---|---|\n| <iframe src=x> | c |",
    ]
    found = page.evaluate(
        """async (texts) => {
          const { MarkdownView } = await import('./markdown.js');
          const host = document.body.appendChild(document.createElement('div'));
          for (const text of texts) new MarkdownView(host).update(text);
          await new Promise(done => setTimeout(done, 100));
          const tags = [...host.querySelectorAll('script, img, svg, iframe')].length;
          const links = [...host.querySelectorAll('a')].map(a => a.protocol);
          const names = [...host.querySelectorAll('*')].flatMap(node => node.getAttributeNames());
          const handlers = names.filter(name => name.startsWith('on'));
          return [tags, [...new Set(links)], handlers, window.bad ?? null];
        }""",
        hostile,
    )
    assert found == [0, ["https:"], [], None]


def test_random_text_is_rendered_quickly_and_completely(open_page: Open) -> None:
    page = open_page()
    dice = random.Random(5)
    noise = ["".join(dice.choices("*_`~[]()<>#|-+>\\! \n\t1.ab", k=400)) for _ in range(60)]
    noise += ["*" * 3000, "_a" * 1500, "[" * 3000, "> " * 3000, "- " * 1000, "`" * 3000, "**a " * 1000]
    took = page.evaluate(
        """async (texts) => {
          const { MarkdownView } = await import('./markdown.js');
          const start = performance.now();
          for (const text of texts) new MarkdownView(document.createElement('div')).update(text);
          return performance.now() - start;
        }""",
        noise,
    )
    # Generous: only runaway backtracking takes longer.
    assert took < 10_000
