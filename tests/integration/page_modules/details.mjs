import assert from "node:assert/strict";
import { test } from "node:test";

import { findPhases } from "./static/details.js";

const [CREATED, FETCHING, RUNNING, ENDED] = [0, 1, 3, 7].map((second) =>
  new Date(Date.UTC(2026, 10, 26, 12, 0, second)).toISOString(),
);
const TIMES = { created: CREATED, fetching: null, running: null, ended: null };

const STATUSES = [
  [{}, []],
  [{ fetching: FETCHING }, [["Waiting", 0, 1]]],
  [
    { fetching: FETCHING, running: RUNNING, ended: ENDED },
    [
      ["Waiting", 0, 1],
      ["Fetching and waiting", 1, 3],
      ["Running", 3, 7],
    ],
  ],
  [{ ended: ENDED }, [["Waiting", 0, 7]]],
  [
    { fetching: FETCHING, ended: CREATED }, // the clock was set back
    [
      ["Waiting", 0, 1],
      ["Fetching and waiting", 1, 1],
    ],
  ],
];

for (const [times, expected] of STATUSES) {
  test(`phases of ${Object.keys(times)}`, () => {
    const phases = findPhases({ ...TIMES, ...times });
    assert.deepEqual(
      phases.map(({ words, from, to }) => [words, from, to]),
      expected,
    );
  });
}
