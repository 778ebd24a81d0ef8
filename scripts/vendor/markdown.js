/** The parser of Markdown that statement.js walks the tokens of. */
export { default } from "markdown-it";
