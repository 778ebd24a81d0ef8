import assert from "node:assert/strict";
import { test } from "node:test";

/** An element as far as statement.js uses one. */
class FakeElement {
  constructor(tag) {
    this.tag = tag;
    this.childNodes = [];
  }

  append(...nodes) {
    this.childNodes.push(...nodes);
  }

  setAttribute(name, value) {
    this[name] = value;
  }

  addEventListener() {}
}

globalThis.document = { createElement: (tag) => new FakeElement(tag) };

const { hasFormula, renderStatement } = await import("./static/statement.js");
const { parseMarkdown } = await import("./static/vendor-markdown.js");

/** Return nodes in the notation of HTML. */
function show(nodes) {
  return nodes
    .map((node) => {
      if (typeof node === "string") return node;
      const { tag, childNodes, ...attributes } = node;
      const words = Object.entries(attributes).map(([name, value]) => ` ${name}=${value}`);
      return `<${tag}${words.join("")}>${show(childNodes)}</${tag}>`;
    })
    .join("");
}

const LINK = "<a href=https://example.org/ rel=noopener noreferrer target=_blank>";
const sample = (text) =>
  `<div className=sample><pre>${text}</pre><button type=button className=small copy>Copy</button></div>`;
const STATEMENTS = {
  "# Sums\n\nAdd.": "<p>Add.</p>",
  "# Products\n\nAdd.": "<h2>Products</h2><p>Add.</p>",
  "### deep\n\n# flat\n\n### deeper": "<h2>deep</h2><h2>flat</h2><h3>deeper</h3>",
  "a *b* **c** ~~d~~ `<e>`": "<p>a <em>b</em> <strong>c</strong> <s>d</s> <code><e></code></p>",
  "- a\n- b\n  - c": "<ul><li>a</li><li>b<ul><li>c</li></ul></li></ul>",
  "3. a": "<ol start=3><li>a</li></ol>",
  "a  \nb\nc": "<p>a<br></br>b\nc</p>",
  "> a\n\n---": "<blockquote><p>a</p></blockquote><hr></hr>",
  "```py\nx < 1\n```\n\n    y": sample("x < 1\n") + sample("y\n"),
  "|a|b|\n|-|-:|\n|1|2|":
    "<table><thead><tr><th>a</th><th className=right>b</th></tr></thead>" +
    "<tbody><tr><td>1</td><td className=right>2</td></tr></tbody></table>",
  "<script>alert()</script>": "<p><script>alert()</script></p>",
  "a <b onclick=x>c</b>": "<p>a <b onclick=x>c</b></p>",
  "[a](https://example.org/)": `<p>${LINK}a</a></p>`,
  "<https://example.org/>": `<p>${LINK}https://example.org/</a></p>`,
  "[a](ftp://example.org/)": "<p><span>a</span></p>",
  "[a](#evaluate?command=x)": "<p><span>a</span></p>",
  "[a](//example.org/)": "<p><span>a</span></p>",
  "[a](javascript:alert)": "<p>[a](javascript:alert)</p>",
  "![a *b*](https://example.org/x.png)": "<p>[image: a *b*]</p>",
  "": "",
};

for (const [markdown, shown] of Object.entries(STATEMENTS)) {
  test(JSON.stringify(markdown), () => {
    assert.equal(show(renderStatement(parseMarkdown(markdown), "Sums")), shown);
  });
}

const FORMULAS = {
  "$n^2$ and $$a\nb$$": "<p>{n^2} and {{a\nb}}</p>",
  "$5 and $6": "<p>$5 and $6</p>",
  "`$x$`, \\$x$": "<p><code>$x$</code>, $x$</p>",
  "$ x$ $x $ $$": "<p>$ x$ $x $ $$</p>",
  "$bad$": "<p><code>$bad$</code></p>",
};

for (const [markdown, shown] of Object.entries(FORMULAS)) {
  test(JSON.stringify(markdown), () => {
    const make = (text, isDisplayed) => {
      if (text === "bad") throw new Error("no formula");
      return isDisplayed ? `{{${text}}}` : `{${text}}`;
    };
    const tokens = parseMarkdown(markdown);
    assert.equal(hasFormula(tokens), /[{]|bad/.test(shown));
    assert.equal(show(renderStatement(tokens, "Sums", { makeFormula: make })), shown);
  });
}

test("pictures are those that the server has found", () => {
  const tokens = parseMarkdown("![a](a.png) ![b](b.png) ![c](toString)");
  const nodes = renderStatement(tokens, "Sums", { pictures: { "a.png": "data:,a" } });
  const shown = "<p><img src=data:,a alt=a></img> [image: b] [image: c]</p>";
  assert.equal(show(nodes), shown);
});

test("pictures may have any name", () => {
  for (const name of ["sch\u00f6n.png", "my%20dot.png", "100%.png", "\u00f6%20x.png"]) {
    const nodes = renderStatement(parseMarkdown(`![a](${name})`), "", { pictures: { [name]: "data:,a" } });
    assert.equal(show(nodes), "<p><img src=data:,a alt=a></img></p>", name);
  }
});

test("elements that are not known are text", () => {
  const nodes = renderStatement(parseMarkdown("<script>alert()</script>"), "Sums");
  assert.deepEqual(nodes[0].childNodes, ["<script>alert()</script>"]);
});

test("statements as long as the server sends them, nested or not", () => {
  for (const piece of ["> ", "* ", "[", "**a", "|a", "`", "$", "$a ", "$$a"]) {
    renderStatement(parseMarkdown(piece.repeat(65536 / piece.length)), "Sums");
  }
});
