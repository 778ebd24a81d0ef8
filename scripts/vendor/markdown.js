/** The parser of Markdown with formulas that statement.js walks the tokens of. */

import MarkdownIt from "markdown-it";

/** Take `$...$` and `$$...$$`; a dollar before a space, and one after it, is a dollar. */
function takeFormula(state, silent) {
  const { src, pos } = state;
  if (src[pos] !== "$") return false;
  const mark = src[pos + 1] === "$" ? "$$" : "$";
  const start = pos + mark.length;
  const end = src.indexOf(mark, start);
  if (end <= start) return false;
  const content = src.slice(start, end);
  const isSum = mark === "$" && (/^\s|\s$/.test(content) || /\d/.test(src[end + 1] ?? ""));
  if (isSum) return false;
  if (!silent) Object.assign(state.push("formula", "math", 0), { content, markup: mark });
  state.pos = end + mark.length;
  return true;
}

/** Return the tokens of a text in Markdown, whose markup in HTML is text. */
export function parseMarkdown(text) {
  const parser = new MarkdownIt({ html: false });
  parser.inline.ruler.after("escape", "formula", takeFormula);
  return parser.parse(text, {});
}
