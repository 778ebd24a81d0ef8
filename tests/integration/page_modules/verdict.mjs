import assert from "node:assert/strict";
import { test } from "node:test";

import { parse } from "./static/values.js";
import { Tally, scoreWords, summarize, verdictOf } from "./static/verdict.js";

function results(members) {
  return { goals: {}, goals_omitted: 0, cases: {}, progress: null, score: null, ...members };
}

function score(points, maximum = null) {
  return { score: { score: points, maximum } };
}

const FINISHED = [
  ["Finished", "plain", null],
  ["Finished", "plain", { progress: { done: 1, total: 1 } }],
  ["Finished", "plain", score(7)],
  ["Accepted", "good", { cases: { accepted: 2 } }],
  ["Accepted", "good", { goals: { fast: true } }],
  ["Accepted", "good", score(100, 100)],
  ["Accepted", "good", { cases: { accepted: 1 }, goals: { fast: true }, ...score(5, 5) }],
  ["Wrong answer", "bad", { cases: { accepted: 8, wrong_answer: 1, time_limit: 3 } }],
  ["Time limit", "bad", { cases: { time_limit: 1, wrong_answer: 9 }, ...score(0, 10) }],
  ["Judge error", "bad", { cases: { wrong_answer: 9, compile_error: 1, judge_error: 1 } }],
  ["Compile error", "bad", { cases: { wrong_answer: 1, compile_error: 1 }, ...score(5, 10) }],
  ["Partly correct", "partly", { cases: { accepted: 3, wrong_answer: 1 }, ...score(30, 40) }],
  ["Partly correct", "partly", { cases: { accepted: 3, partial: 1 } }],
  ["Partly correct", "partly", { goals: { fast: false, legal: true } }],
  ["Partly correct", "partly", { cases: { accepted: 3 }, ...score(1, 2) }],
  ["Not accepted", "bad", { cases: { accepted: 3 }, goals: { fast: false } }],
  ["Not accepted", "bad", { goals: { fast: false, legal: false } }],
  ["Not accepted", "bad", { cases: { accepted: 3 }, ...score(0, 2) }],
  ["Incomplete", "partly", { cases: { accepted: 3, skipped: 1 } }],
  ["Incomplete", "partly", { cases: { skipped: 1 } }],
  ["Incomplete", "partly", { goals: { fast: true }, goals_omitted: 1 }],
];

for (const [words, tone, members] of FINISHED) {
  test(`${JSON.stringify(members)} is ${words}`, () => {
    const status = { state: "finished", results: members && results(members) };
    assert.deepEqual(verdictOf(status), { words, tone });
  });
}

const OTHERS = [
  ["queued", null, "Queued", "live"],
  ["running", results({ cases: { accepted: 1, skipped: 1 }, ...score(0, 9) }), "Running", "live"],
  ["running", results({ cases: { time_limit: 1 } }), "Time limit so far", "bad"],
  ["failed", results({ cases: { accepted: 1 } }), "Evaluation failed", "bad"],
  ["cancelled", results({ cases: { accepted: 1 } }), "Cancelled", "plain"],
  ["gone", null, "Gone", "plain"],
];

for (const [state, found, words, tone] of OTHERS) {
  test(`${state} with ${JSON.stringify(found)} is ${words}`, () => {
    assert.deepEqual(verdictOf({ state, results: found }), { words, tone });
  });
}

test("words of a score and a summary", () => {
  assert.equal(scoreWords(null), "");
  assert.equal(scoreWords(results(score(100 / 3, 100))), "33.3333 of 100");
  assert.equal(scoreWords(results(score(1))), "1 point");
  assert.deepEqual(
    summarize(results({ goals: { a: true }, cases: { accepted: 1, time_limit: 1 }, ...score(1, 2) })),
    ["score 1 of 2", "1 of 1 goal reached", "1 of 2 cases accepted (1 time limit)"],
  );
});

test("a tally has what the daemon's summary has", () => {
  const tally = new Tally();
  const taken = [
    '{"type": "case", "case": "a", "verdict": "wrong_answer"}',
    '{"type": "case", "case": "a", "verdict": "accepted"}',
    '{"type": "goal_result", "goal": "__proto__", "result": false}',
    '{"type": "goal_result", "goal": "fast", "result": false}',
    '{"type": "goal_result", "goal": "fast", "result": true}',
    '{"type": "progress", "done": 1, "total": 2}',
    '{"type": "score", "score": 7.50, "maximum": 10}',
  ];
  const ignored = [
    "null",
    "7",
    '["case"]',
    '{"type": "case", "case": 7, "verdict": "accepted"}',
    '{"type": "case", "case": "a", "verdict": "toString"}',
    '{"type": "case", "case": "a", "verdict": ["accepted"]}',
    '{"type": "goal_result", "goal": "fast", "result": "yes"}',
    '{"type": "progress", "done": -1, "total": 2}',
    '{"type": "score", "score": 9, "goal": "fast"}',
    '{"type": "score", "score": {"source": "9"}}',
    '{"type": "score", "score": 1e999}',
    '{"type": {"type": "case"}}',
  ];
  for (const value of taken) assert.ok(tally.add(parse(value)), value);
  for (const value of ignored) assert.ok(!tally.add(parse(value)), value);
  const { goals, ...others } = tally.results;
  assert.deepEqual(Object.entries(goals), [
    ["__proto__", false],
    ["fast", true],
  ]);
  assert.deepEqual(others, {
    goals_omitted: 0,
    cases: { wrong_answer: 1, accepted: 1 },
    progress: { done: 1, total: 2 },
    score: { score: 7.5, maximum: 10 },
  });
});

test("a tally keeps a bounded number of goals", () => {
  const tally = new Tally();
  for (let n = 0; n < 150; n++) tally.add({ type: "goal_result", goal: `${n}`, result: true });
  assert.equal(Object.keys(tally.results.goals).length, 100);
  assert.equal(tally.results.goals_omitted, 50);
});
