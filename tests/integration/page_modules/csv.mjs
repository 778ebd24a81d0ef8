import assert from "node:assert/strict";
import { test } from "node:test";

import { makeCsv } from "./static/csv.js";

test("cells are quoted, rows end in CRLF, and numbers and null stay", () => {
  const rows = [
    ["ann", -5, null, undefined],
    ['say "hi", bob', 1.5, "à\nb", ""],
  ];
  assert.equal(makeCsv(rows), '"ann",-5,,\r\n"say ""hi"", bob",1.5,"à\nb",""\r\n');
});

for (const [text, safe] of [
  ["=1+1", "'=1+1"],
  ["+1", "'+1"],
  ["-1", "'-1"],
  ["@SUM(A1)", "'@SUM(A1)"],
  ["\uff1dA1", "'\uff1dA1"],
  ["\uff0b1", "'\uff0b1"],
  ["\uff0d1", "'\uff0d1"],
  ["\uff20A", "'\uff20A"],
  ["  =1", "  '=1"],
  ["\t=1", "\t'=1"],
  ["\r=1", "\r'=1"],
  ["\n=1", "\n'=1"],
  ["a;=1", "a;'=1"],
  ["a,@1", "a,'@1"],
  ["a\t=1;+2\n-3", "a\t'=1;'+2\n'-3"],
  ["a; =1", "a; '=1"],
  ['a;"=1', 'a;"\'=1'],
  ['"=1', '"\'=1'],
  ["'=1", "''=1"],
  ["\0=1", "'=1"],
  ["\x1b;\x7f=1", ";'=1"],
  ["a|=1", "a|'=1"],
  ["\u2028=1", "\u2028'=1"],
  ["\ufeff=1", "\ufeff'=1"],
  ["a=1", "a=1"],
  ["a-b", "a-b"],
  ["ann@example.org", "ann@example.org"],
]) {
  test(`${JSON.stringify(text)} is no formula`, () => {
    assert.equal(makeCsv([[text]]), `"${safe.replaceAll('"', '""')}"\r\n`);
  });
}

test("long runs of what a spreadsheet drops take no long time", () => {
  const begin = performance.now();
  assert.equal(makeCsv([[`${"\t".repeat(65_535)}=1`]]), `"${"\t".repeat(65_535)}'=1"\r\n`);
  makeCsv([["\t".repeat(65_535)], [";=".repeat(30_000)]]);
  assert.ok(performance.now() - begin < 5000);
});
