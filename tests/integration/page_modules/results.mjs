import assert from "node:assert/strict";
import { test } from "node:test";

import { readText, safeName } from "./static/results.js";

const NAMES = [
  ["tour.csv", "tour.csv"],
  ["../../etc/passwd", "passwd"],
  ["C:\\x\\notes.txt", "notes.txt"],
  ["\u202efdp.<b>.exe", "fdp.b.exe"],
  ["..", "file"],
  ["\ud83d\ude00".repeat(200), "\ud83d\ude00".repeat(100)],
];

for (const [name, expected] of NAMES) {
  test(`the file name ${JSON.stringify(name).slice(0, 40)}`, () => {
    assert.equal(safeName(name), expected);
  });
}

const CONTENTS = [
  ["short", "short"],
  ["", ""],
  ["a\0b", null],
  ["x".repeat(10_000), `${"x".repeat(8192)}…`],
  [`${"x".repeat(8191)}ü`, `${"x".repeat(8191)}…`],
];

for (const [content, expected] of CONTENTS) {
  test(`the beginning of ${content.length} characters`, () => {
    assert.equal(readText(new TextEncoder().encode(content)), expected);
  });
}

test("what is no text has no beginning", () => {
  assert.equal(readText(new Uint8Array([0xff, 0xfe])), null);
});
