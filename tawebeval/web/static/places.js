/** Places in submitted files that messages of compilers and interpreters name. */

const MOST_NAMES = 20;
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
