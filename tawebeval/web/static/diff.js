/** Differences of two texts, line by line. The work is bounded by lines and characters. */

const MOST_LINES = 200; // of each text
const LONGEST_LINE = 400; // characters that are shown
const BEFORE = 100; // characters that are shown before a difference
const UNSEEN = /[\p{Cc}\p{Cf}\p{Zl}\p{Zp}]/gu;

/**
 * Return `rows` and whether lines are `cut`. A row has the lines `expected` and `printed` that stand
 * side by side, null for none, and a `kind`: "same", "changed", "missing" or "extra".
 */
export function diffLines(expected, printed) {
  const [left, right] = [expected, printed].map((text) => text.split("\n"));
  const over = [left, right].map((lines) => lines.splice(MOST_LINES).length > 0);
  const cut = over.includes(true) || [...left, ...right].some((line) => line.length > LONGEST_LINE);
  const rows = [];
  const missing = [];
  const extra = [];
  const pair = () => {
    for (let n = 0; n < Math.max(missing.length, extra.length); n++) {
      const [one, other] = [missing[n] ?? null, extra[n] ?? null];
      const kind = one === null ? "extra" : other === null ? "missing" : "changed";
      rows.push({ kind, expected: one, printed: other });
    }
    missing.length = extra.length = 0;
  };
  const lengths = commonLengths(left, right);
  for (let [i, j] = [0, 0]; i < left.length || j < right.length; ) {
    if (i < left.length && j < right.length && left[i] === right[j]) {
      pair();
      rows.push({ kind: "same", expected: left[i++], printed: right[j++] });
    } else if (j === right.length || (i < left.length && lengths[i + 1][j] >= lengths[i][j + 1])) {
      missing.push(left[i++]);
    } else extra.push(right[j++]);
  }
  pair();
  return { rows, cut };
}

/** Return the lengths of the longest common subsequences of the ends of two lists. */
function commonLengths(left, right) {
  const lengths = Array.from({ length: left.length + 1 }, () => new Uint8Array(right.length + 1));
  for (let i = left.length - 1; i >= 0; i--) {
    for (let j = right.length - 1; j >= 0; j--) {
      lengths[i][j] =
        left[i] === right[j]
          ? lengths[i + 1][j + 1] + 1
          : Math.max(lengths[i + 1][j], lengths[i][j + 1]);
    }
  }
  return lengths;
}

/**
 * Return the parts of both lines of a changed row: what is equal before the difference, the
 * difference, and what is equal after it.
 */
export function markDifference(expected, printed) {
  const [left, right] = [[...expected], [...printed]];
  const shortest = Math.min(left.length, right.length);
  let start = 0;
  while (start < shortest && left[start] === right[start]) start += 1;
  let end = 0;
  while (end < shortest - start && left.at(-1 - end) === right.at(-1 - end)) end += 1;
  const before = left.slice(0, start).join("");
  const after = left.slice(left.length - end).join("");
  return [left, right].map((line) => [
    before.length > BEFORE ? `\u2026${visible(before.slice(-BEFORE))}` : visible(before),
    visible(line.slice(start, line.length - end).join("")),
    visible(after),
  ]);
}

/** Return a line, cut where it is too long, in which control characters can be seen. */
export function visible(line) {
  const shown = line.slice(0, LONGEST_LINE).replace(UNSEEN, (character) => {
    const code = character.codePointAt(0);
    if (code === 9) return character;
    if (code < 32) return String.fromCodePoint(0x2400 + code);
    return `\u27e8U+${code.toString(16).toUpperCase()}\u27e9`;
  });
  return line.length > LONGEST_LINE ? `${shown}\u2026` : shown;
}
