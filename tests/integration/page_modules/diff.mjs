import assert from "node:assert/strict";
import { test } from "node:test";

import { diffLines, markDifference, visible } from "./static/diff.js";

const TEXTS = [
  ["1\n2\n3", "1\n2\n3", "same same same"],
  ["1\n2\n3", "1\n7\n3", "same changed same"],
  ["1\n2\n3", "1\n3", "same missing same"],
  ["1\n3", "1\n2\n3", "same extra same"],
  ["a\nb\nc\nd", "b\nc\nx\nd\ne", "missing same same extra same extra"],
  ["a\nb", "x\ny\nz", "changed changed extra"],
  ["", "", "same"],
  ["1", "1\n", "same extra"],
];

for (const [expected, printed, kinds] of TEXTS) {
  test(`${JSON.stringify(expected)} and ${JSON.stringify(printed)}`, () => {
    const { rows, cut } = diffLines(expected, printed);
    assert.equal(rows.map(({ kind }) => kind).join(" "), kinds);
    assert.equal(cut, false);
    for (const [side, text] of Object.entries({ expected, printed })) {
      const lines = rows.map((row) => row[side]).filter((line) => line !== null);
      assert.equal(lines.join("\n"), text);
    }
  });
}

test("texts of very many lines are cut", () => {
  const { rows, cut } = diffLines("a\n".repeat(100_000), "b\n".repeat(100_000));
  assert.equal(rows.length, 200);
  assert.equal(cut, true);
});

const LINES = [
  ["12345", "12945", ["12", "3", "45"], ["12", "9", "45"]],
  ["abc", "abcabc", ["abc", "", ""], ["abc", "abc", ""]],
  ["same", "same", ["same", "", ""], ["same", "", ""]],
  ["1", "1\r", ["1", "", ""], ["1", "\u240d", ""]],
  ["\u{1f600}", "\u{1f601}", ["", "\u{1f600}", ""], ["", "\u{1f601}", ""]],
];

for (const [expected, printed, left, right] of LINES) {
  test(`difference of ${JSON.stringify(expected)} and ${JSON.stringify(printed)}`, () => {
    assert.deepEqual(markDifference(expected, printed), [left, right]);
  });
}

test("a difference far to the right is shown", () => {
  const long = "x".repeat(5000);
  const [[before, left, after], [, right]] = markDifference(`${long}1${long}`, `${long}2${long}`);
  assert.deepEqual([left, right], ["1", "2"]);
  assert.equal(before, `\u2026${"x".repeat(100)}`);
  assert.equal(after, `${"x".repeat(400)}\u2026`);
});

test("characters that are not seen", () => {
  assert.equal(visible("a\tb\0\u202e\x7f"), "a\tb\u2400\u27e8U+202E\u27e9\u27e8U+7F\u27e9");
});
