import assert from "node:assert/strict";
import { test } from "node:test";

import { addEntry, ageWords, nameFiles, nameSubject, readEntries } from "./static/history.js";

const id = (number) => String(number).padStart(40, "a");

test("the newest entries are kept, each once, and nothing of another form", () => {
  let entries = null;
  for (let number = 0; number < 150; number++) entries = addEntry(entries, { id: id(number) });
  assert.equal(entries.length, 100);
  entries = addEntry(entries, { id: id(120), file: "a.py" });
  assert.equal(entries.length, 100);
  assert.deepEqual(entries[0], { id: id(120), file: "a.py" });
  assert.equal(entries.filter((each) => each.id === id(120)).length, 1);
  for (const kept of [null, {}, "x", [null], [{ id: 1 }], [{ id: "<b>" }], [{ id: "a" }]]) {
    assert.deepEqual(readEntries(kept), []);
  }
});

test("files are named in a few words", () => {
  const form = new FormData();
  form.append("metadata[a]", "b");
  assert.equal(nameFiles(form), "");
  form.append("submission[note]", "a text");
  assert.equal(nameFiles(form), "note.txt");
  form.append("submission[source]", new Blob(["x"]), "a.py");
  form.append("submission[more]", new Blob(["x"]), "b.py");
  assert.equal(nameFiles(form), "note.txt and 2 more");
});

test("ages are in words", () => {
  const now = Date.parse("2026-11-26T12:00:00.000+00:00");
  for (const [seconds, words] of [
    [-5, "just now"],
    [59, "just now"],
    [60, "1 minute ago"],
    [3599, "59 minutes ago"],
    [7200, "2 hours ago"],
    [90_000, "1 day ago"],
  ]) {
    assert.equal(ageWords(new Date(now - 1000 * seconds).toISOString(), now), words);
  }
});

test("evaluations are named by problem, directory or command", () => {
  const titles = new Map([["sums", "Sums"], ["bare", ""]]);
  const name = (problem, directory, command) =>
    nameSubject({ problem, directory, evaluator_cmd: command }, titles);
  assert.equal(name("sums", "a", "b"), "Sums");
  assert.equal(name("bare", "a", "b"), "bare");
  assert.equal(name("gone", "a", "b"), "gone");
  assert.equal(name(null, "a", "b"), "a");
  assert.equal(name(null, "", "b"), "b");
  assert.equal(name(null, "", "b".repeat(99)).length, 61);
});
