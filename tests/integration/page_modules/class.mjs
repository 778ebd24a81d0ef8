import assert from "node:assert/strict";
import { mock, test } from "node:test";

globalThis.document = {
  createElement: () => ({ dataset: {}, append() {}, replaceChildren() {}, setAttribute() {} }),
};
const { Row } = await import("./static/class.js");

const ID = "a".repeat(40);
const content = new Blob(["1\n"]);
const file = { name: "a.txt", content };

function makeRow() {
  return new Row({ name: "ann", files: [file] }, { pairs: [{ field: "source", file }] });
}

/** Evaluate a row, with these answers of the server; return what was requested. */
async function evaluate(row, answers, signal = new AbortController().signal, former = null) {
  const requests = [];
  mock.method(globalThis, "fetch", async (url, { method = "GET", headers }) => {
    requests.push({ method, url: `${url}`, key: headers["Idempotency-Key"] });
    return answers.shift()();
  });
  await row.evaluate("sums", "", signal, former);
  return requests;
}

const accepted = () => Response.json({ evaluation_id: ID });
const ended = () => new Response(null, { status: 204 });
const finished = () => Response.json({ state: "finished", results: null });
const refused = (status) => () => Response.json({ message: "no" }, { status });

test("a submission that was stopped has the same key again", async () => {
  const row = makeRow();
  const stopping = new AbortController();
  const lost = () => {
    stopping.abort();
    throw new TypeError("no answer");
  };
  const [first] = await evaluate(row, [lost], stopping.signal);
  assert.equal(row.state, "stopped");
  const [second] = await evaluate(row, [accepted, ended, finished]);
  assert.match(first.key, /^[0-9a-f]{32}$/);
  assert.equal(second.key, first.key);
  assert.ok(row.isOver);
});

for (const status of [404, 410]) {
  test(`a submission whose evaluation is gone (${status}) begins another`, async () => {
    const row = makeRow();
    const [first] = await evaluate(row, [accepted, ended, refused(status)]);
    assert.deepEqual([row.id, row.isOpen], [null, true]);
    const [second] = await evaluate(row, [accepted, ended, finished]);
    assert.equal(second.method, "POST");
    assert.notEqual(second.key, first.key);
  });
}

test("a submission that was refused has another key", async () => {
  const row = makeRow();
  const [first] = await evaluate(row, [refused(422)]);
  const [second] = await evaluate(row, [accepted, ended, finished]);
  assert.notEqual(second.key, first.key);
});

test("a row submits the same files, to the same fields", () => {
  const pairs = (field, content) => ({ pairs: [{ field, file: { name: "a.txt", content } }] });
  assert.ok(makeRow().submits(pairs("source", content)));
  assert.ok(!makeRow().submits(pairs("other", content)));
  assert.ok(!makeRow().submits(pairs("source", new Blob(["1\n"]))));
  assert.ok(!makeRow().submits({ wrong: "2 files" }));
});

test("a verdict stays where it is not run again, by the evaluator as it is now", async () => {
  const row = Row.restore("ann", { evaluation_id: ID, state: "finished", results: null });
  for (const status of [403, 410]) {
    const [{ url }] = await evaluate(row, [refused(status)], undefined, "finished");
    assert.ok(url.endsWith(`/evaluation/${ID}/rerun?evaluator=current`));
    assert.deepEqual([row.id, row.isOver], [ID, true]);
  }
});
