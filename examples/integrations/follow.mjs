// Submit a file and follow its evaluation: node follow.mjs SERVER REPOSITORY COMMIT FILE

import { randomUUID } from "node:crypto";
import { readFile } from "node:fs/promises";
import { basename } from "node:path";

const sleep = (seconds) => new Promise((resolve) => setTimeout(resolve, 1000 * seconds));

/** Repeat a request; return JSON and headers. */
async function request(url, options = {}, attempts = 8) {
  const token = process.env.TAWEBEVAL_TOKEN;
  const headers = { ...options.headers, ...(token && { Authorization: `Bearer ${token}` }) };
  let reason;
  for (let failures = 0; failures < attempts; failures++) {
    let [answer, value] = [];
    try {
      const signal = options.body ? undefined : AbortSignal.timeout(60_000);
      answer = await fetch(url, { ...options, headers, signal });
      reason = answer.status;
      value = await answer.json();
    } catch (error) {
      answer = undefined; // no answer, or an incomplete one
      reason = error.cause ?? error;
    }
    if (answer?.ok) return [value, answer.headers];
    if (answer?.status < 500 && ![408, 429].includes(answer.status)) {
      throw new Error(`${url}: ${answer.status}: ${value.message}`);
    }
    const least = Number(answer?.headers.get("Retry-After") ?? 0);
    await sleep(Math.max(least, Math.min(0.1 * 2 ** failures, 10)));
  }
  throw new Error(`${url}: no usable answer: ${reason}`);
}

/** Submit a FormData; return the identifier. */
async function evaluate(base, form) {
  const headers = { "Idempotency-Key": randomUUID() };
  const [answer] = await request(`${base}/evaluate`, { method: "POST", body: form, headers });
  return answer.evaluation_id;
}

/** Yield the events, each once and in order. */
async function* events(base, id, after = "") {
  while (after !== null) {
    const url = `${base}/evaluation/${id}/events?wait=25&after=${after}`;
    const [page, headers] = await request(url, {}, 66); // 10 minutes
    yield* page.data;
    after = page.end;
    if (after !== null && page.data.length === 0 && !headers.has("Preference-Applied")) {
      await sleep(Number(headers.get("Retry-After") ?? 0.5));
    }
  }
}

const [base, repository, commit, file] = process.argv.slice(2);
const form = new FormData();
form.append("submission[source]", new Blob([await readFile(file)]), basename(file));
form.append("repository[url]", repository);
form.append("commit_oid", commit);
form.append("evaluator_cmd", "sh evaluator.sh");
for await (const event of events(base, await evaluate(base, form))) {
  if (event.type === "text") process.stdout.write(event.payload);
  else console.log("DATA", JSON.stringify(event.payload));
  if (event.payload?.type === "evaluation_error") process.exitCode = 1;
}
