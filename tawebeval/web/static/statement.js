/** Statements of problems: Markdown as elements, without markup of its author. */

import { copy, element } from "./dom.js";
import { say } from "./language.js";

const TAGS = new Set("p ul ol li blockquote em strong s table thead tbody tr th td".split(" "));
const LINKED = ["http:", "https:"];

/**
 * Return the nodes of a statement from its tokens. A first heading that repeats `title` is left
 * out. `makeFormula(text, isDisplayed)` returns the node of a formula, and throws for what is none.
 * `pictures` are URLs by what the text calls them; others are not shown.
 */
export function renderStatement(tokens, title, { makeFormula, pictures = {} } = {}) {
  const repeats = tokens[0]?.type === "heading_open" && tokens[1].content.trim() === title;
  const rest = repeats ? tokens.slice(3) : tokens;
  let level = 1; // of the page's own heading above; none is left out
  for (const token of rest.filter(({ type }) => type === "heading_open")) {
    level = Math.min(Number(token.tag[1]) + 1, level + 1, 6);
    token.tag = `h${level}`;
  }
  return renderTokens(rest, { makeFormula, pictures });
}

/** Whether there are formulas among these tokens. */
export function hasFormula(tokens) {
  return tokens.some(({ type, children }) => type === "formula" || hasFormula(children ?? []));
}

function renderTokens(tokens, found) {
  const root = element("div");
  const open = [root];
  for (const token of tokens) {
    if (token.hidden) continue; // a paragraph of a list without empty lines
    if (token.nesting === -1) {
      open.pop();
      continue;
    }
    const nodes =
      token.type === "inline"
        ? renderTokens(token.children, found)
        : [makeNode(token, found)];
    open.at(-1).append(...nodes);
    if (token.nesting === 1) open.push(nodes[0]);
  }
  return [...root.childNodes];
}

/** Return the node of a token; of an unknown one, its text. */
function makeNode(token, { makeFormula, pictures }) {
  const { type, tag, content } = token;
  if (type === "text") return content;
  if (type === "softbreak") return "\n";
  if (["hardbreak", "hr", "heading_open"].includes(type)) return element(tag);
  if (type === "code_inline") return element("code", {}, content);
  if (type === "fence" || type === "code_block") return makeSample(content);
  if (type === "formula") return makeFormulaNode(token, makeFormula);
  if (type === "image") {
    const src = decode(token.attrGet("src")); // the parser encodes what is beyond ASCII
    const name = Object.keys(pictures).find((each) => decode(each) === src);
    if (name === undefined) return say("[image: {text}]", { text: content });
    return element("img", { src: pictures[name], alt: content });
  }
  if (type === "link_open") return makeLink(token.attrGet("href"));
  if (!TAGS.has(tag)) return token.nesting === 1 ? element("span") : content;
  const made = element(tag);
  if (token.attrGet("start") !== null) made.start = Number(token.attrGet("start"));
  if (token.attrGet("style") === "text-align:right") made.className = "right";
  return made;
}

function decode(path) {
  try {
    return decodeURIComponent(path);
  } catch {
    return path; // a percent sign of its own
  }
}

/** Return a text such as an example of input, with a button that copies it. */
function makeSample(content) {
  const button = element("button", { type: "button", className: "small copy" }, say("Copy"));
  button.addEventListener("click", () => copy(button, content));
  return element("div", { className: "sample" }, element("pre", {}, content), button);
}

function makeFormulaNode({ content, markup }, makeFormula) {
  try {
    return makeFormula(content, markup === "$$");
  } catch {
    return element("code", {}, `${markup}${content}${markup}`);
  }
}

/** Return a link to a page of the web; for another address an element without an effect. */
function makeLink(href) {
  if (!URL.canParse(href) || !LINKED.includes(new URL(href).protocol)) return element("span");
  return element("a", { href, rel: "noopener noreferrer", target: "_blank" });
}
