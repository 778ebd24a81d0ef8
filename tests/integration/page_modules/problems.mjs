import assert from "node:assert/strict";
import { test } from "node:test";

import { timeWords } from "./static/problems.js";

const [before, now, after] = ["2026-01-01T10:00Z", Date.parse("2026-01-02T10:00Z"), "2026-01-03T10:00Z"];

test("times of a problem are told while they matter", () => {
  assert.equal(timeWords({ opens: before, closes: null }, now), "");
  assert.match(timeWords({ opens: after, closes: after }, now), /^opens .*2026/);
  assert.match(timeWords({ opens: before, closes: after }, now), /^closes .*2026/);
  assert.match(timeWords({ closes: before, late: false }, now), /^closed .*[0-9](\s[AP]M)?$/);
  assert.match(timeWords({ closes: before, late: true }, now), / and still takes late submissions$/);
});
