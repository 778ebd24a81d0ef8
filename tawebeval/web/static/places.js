/** Places in submitted files that messages of compilers and interpreters name. */

const MOST_NAMES = 20;
const LONGEST_MESSAGE = 300; // characters
const SPECIAL = /[\\^$.*+?()[\]{}|/]/g;

/**
 * Return a pattern of places such as `name:3:5` and `name", line 3` in files of these names; null
 * without a name.
 */
export function placePattern(names) {
  const escaped = names.slice(0, MOST_NAMES).map((name) => name.replace(SPECIAL, "\\$&"));
  if (escaped.length === 0) return null;
  return new RegExp(
    `(?<![^\\s/"'(\\[])(${escaped.join("|")})(?::(\\d{1,6})(?::(\\d{1,6}))?|"?, line (\\d{1,6}))`,
    "g",
  );
}

/**
 * Return at most `most` marks for an editor, of what a compiler's message says about places:
 * `name`, `line` and `column` from 1, `message` and `severity`.
 */
export function findMarks(text, pattern, most) {
  const last = text.trim().split("\n").at(-1); // where interpreters say what is wrong
  return findPlaces(text, pattern, most).map(({ end, name, line, column }) => {
    const rest = text.slice(end).split("\n", 1)[0].replace(/^[\s:,]+/, "");
    const [severity = "error"] = /^(?:warning|info)|^note(?=:)/.exec(rest) ?? [];
    const message = (/\w/.test(rest) ? rest : last).slice(0, LONGEST_MESSAGE);
    return { name, line, column, message, severity: severity === "note" ? "info" : severity };
  });
}

/** Return at most `most` places in a text: `start`, `end`, `name`, `line` and `column`, from 1. */
export function findPlaces(text, pattern, most) {
  const places = [];
  if (pattern === null) return places;
  for (const { 0: found, 1: name, 2: line, 3: column, 4: worded, index } of text.matchAll(pattern)) {
    if (places.length === most) break;
    places.push({
      start: index,
      end: index + found.length,
      name,
      line: Number(line ?? worded),
      column: column === undefined ? null : Number(column),
    });
  }
  return places;
}
