import assert from "node:assert/strict";
import { test } from "node:test";

import { makeColumns } from "./static/plot.js";

test("a column for each case, as long as there are few", () => {
  const cases = [{ size: 2, tone: "good" }, { tone: "bad" }];
  assert.deepEqual(makeColumns(cases, "size"), [
    { value: 2, tone: "good", first: 1, last: 1 },
    { value: 0, tone: "bad", first: 2, last: 2 },
  ]);
});

test("of many cases the largest value and the worst tone", () => {
  const cases = Array.from({ length: 10_000 }, (_, n) => ({
    size: n,
    tone: n === 5000 ? "bad" : "good",
  }));
  const columns = makeColumns(cases, "size", 100);
  assert.equal(columns.length, 100);
  assert.deepEqual(columns[0], { value: 99, tone: "good", first: 1, last: 100 });
  assert.deepEqual(
    columns.filter(({ tone }) => tone === "bad").map(({ first }) => first),
    [5001],
  );
  assert.deepEqual(makeColumns([], "size"), []);
});
