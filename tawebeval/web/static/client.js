/**
 * A client of tawebeval: starts evaluations and follows their events.
 *
 *     import { Client } from "https://judge.example.org/static/client.js";
 *
 *     const client = new Client({ token });
 *     const id = await client.evaluate(new FormData(form));
 *     for await (const event of client.events(id)) show(event);
 *
 * Two rules keep it from losing or repeating an event: it requests the next page only after the
 * last one was processed, and it repeats a request unchanged after no answer or an incomplete
 * one. The daemon keeps all events that no later request has acknowledged.
 */

const PATIENCE = 30_000; // ms that an answer may take, in addition to `wait`
const SILENCE = 60_000; // ms after which a stream without a heartbeat is dead
const FIRST_PAUSE = 250; // ms before the second attempt; it doubles for each further one
const LONGEST_PAUSE = 10_000; // ms, unless the server asks for a longer one
const POLL_AGAIN = 500; // ms after an empty page of a server that does not hold requests

/** An error response: `status` is its number, `problem` the problem document (RFC 9457). */
export class Refused extends Error {
  constructor(status, problem, retryAfter) {
    super(problem.message ?? problem.detail ?? `the server answers with status ${status}`);
    this.name = "Refused";
    this.status = status;
    this.problem = problem;
    this.retryAfter = retryAfter; // seconds, 0 if the server does not say
  }
}

/** One daemon, for one caller. */
export class Client {
  /**
   * `server` is the daemon's URL, ending in a slash; by default the one that serves this file.
   * `token` is sent with each request, unless it is empty; a `link` takes its place, and reads one
   * evaluation (`status`, `submission`, `pages`, `stream`). `notice` is called with
   * `{ why, seconds, attempt }` before the pause that precedes each retry, and with null when the
   * server answers again. `parse` reads JSON; a replacement of `JSON.parse` may keep the digits of
   * large numbers. Throws TypeError for a token that a header cannot contain.
   *
   * All methods take an AbortSignal, `signal`, and throw its reason when it is aborted. They
   * throw Refused if a retry cannot help, and the last error after `tries` attempts.
   */
  constructor({ server, token = "", link = "", notice = () => {}, parse = JSON.parse } = {}) {
    this.server = new URL(server ?? new URL("..", import.meta.url));
    const bearer = link || token;
    this.headers = new Headers(bearer ? { Authorization: `Bearer ${bearer}` } : {});
    this.notice = notice;
    this.parse = parse;
    this.serverTime = null; // ms, of the newest answer, by the server's clock
  }

  /**
   * Submit a FormData and return the identifier. Retries start no second evaluation, nor does
   * another call with the same `key`, the Idempotency-Key, which is random by default.
   */
  evaluate(form, options) {
    return this.#begin("evaluate", form, options);
  }

  /** Submit a FormData of files and labels for a problem, as `evaluate` does. */
  evaluateProblem(name, form, options) {
    return this.#begin(`problems/${encodeURIComponent(name)}/evaluate`, form, options);
  }

  /**
   * Run an evaluation again that has ended, as `evaluate` does. The FormData may have other
   * labels and, unless the evaluation was for a problem, another seed, commit and limits. With the
   * `evaluator` "current" it is judged with what its problem is now, such as the newest commit.
   */
  rerun(id, form = new FormData(), { evaluator, ...options } = {}) {
    const query = evaluator === undefined ? "" : `?evaluator=${evaluator}`;
    return this.#begin(`${place(id)}/rerun${query}`, form, options);
  }

  async #begin(path, form, { signal, tries = 8, key = randomKey() } = {}) {
    const headers = { "Idempotency-Key": key };
    const options = { method: "POST", body: form, headers };
    const { body } = await this.#ask(path, options, { signal, tries, patience: 0 });
    return body.evaluation_id;
  }

  /** Return the status document. Acknowledges nothing. */
  async status(id, { signal, tries = 8 } = {}) {
    return (await this.#ask(place(id), {}, { signal, tries })).body;
  }

  /**
   * Return the submitted files: `{ field, filename, size, text }`, or with `base64` in place of
   * `text`, or without both if there is too much.
   */
  async submission(id, { signal, tries = 8 } = {}) {
    return (await this.#ask(`${place(id)}/submission`, {}, { signal, tries })).body.files;
  }

  /**
   * Make a link that only reads this evaluation, for `lifetime` seconds or the server's default.
   * Return `{ link, expires }`.
   */
  async makeLink(id, { lifetime, signal, tries = 8 } = {}) {
    const path = `${place(id)}/links${lifetime === undefined ? "" : `?lifetime=${lifetime}`}`;
    return (await this.#ask(path, { method: "POST" }, { signal, tries })).body;
  }

  /** Revoke all links of an evaluation. */
  async revokeLinks(id, { signal, tries = 8 } = {}) {
    await this.#ask(`${place(id)}/links`, { method: "DELETE" }, { signal, tries });
  }

  /** Cancel an evaluation; return when none of its processes runs. */
  async cancel(id, { signal, tries = 8 } = {}) {
    await this.#ask(place(id), { method: "DELETE" }, { signal, tries });
  }

  /**
   * Yield the evaluations of the caller, and of the members of groups that its token supervises,
   * each once, in order of acceptance: only those of this `caller`, in this `state`,
   * accepted from `since` on and before `until` (each a Date), with the labels of the object
   * `metadata`, for the `problem` of this name. Where several daemons share the address, those of
   * each daemon are in this order; at the end `away` is called with the names of daemons that have
   * not answered, if there are any.
   */
  async *evaluations({ state, caller, problem, since, until, metadata = {}, ...options } = {}) {
    const query = new URLSearchParams();
    if (state !== undefined) query.set("state", state);
    if (caller !== undefined) query.set("caller", caller);
    if (problem !== undefined) query.set("problem", problem);
    if (since !== undefined) query.set("since", since.toISOString());
    if (until !== undefined) query.set("until", until.toISOString());
    for (const [name, value] of Object.entries(metadata)) query.set(`metadata[${name}]`, value);
    yield* this.#list("evaluations", query, "evaluation_id", options);
  }

  /** Yield what callers have reached in problems: `{ caller, problem, submissions, best, ... }`. */
  async *standings(options = {}) {
    const key = ({ caller, problem }) => `${caller} ${problem}`;
    yield* this.#list("standings", new URLSearchParams(), key, options);
  }

  /** Return the caller, and what its token permits. */
  async whoami({ signal, tries = 8 } = {}) {
    return (await this.#ask("whoami", {}, { signal, tries })).body;
  }

  /** Yield the problems that the caller may submit for. */
  async *problems(options = {}) {
    yield* this.#list("problems", new URLSearchParams(), "name", options);
  }

  /**
   * Return a problem with its statement, a text in Markdown, and the URLs of its pictures. The
   * `language` of the statement is by default that of the browser.
   */
  async problem(name, { language, signal, tries = 8 } = {}) {
    const options = language ? { headers: { "Accept-Language": language } } : {};
    const path = `problems/${encodeURIComponent(name)}`;
    return (await this.#ask(path, options, { signal, tries })).body;
  }

  /** Return the environments that a form may choose; the first one is the default. */
  async environments({ signal, tries = 8 } = {}) {
    return (await this.#ask("environments", {}, { signal, tries })).body.data;
  }

  async *#list(path, query, key, { signal, tries = 8, away = () => {} }) {
    const yielded = new Set();
    for (let after = ""; after !== null; ) {
      query.set("after", after);
      const { body } = await this.#ask(`${path}?${query}`, {}, { signal, tries });
      for (const entry of body.data) {
        const name = typeof key === "string" ? entry[key] : key(entry);
        if (yielded.has(name)) continue;
        yielded.add(name);
        yield entry;
      }
      after = body.end;
      if (after === null && body.away?.length > 0) away(body.away);
    }
  }

  /** Yield the events of `pages`, each once and in order. */
  async *events(id, options) {
    for await (const page of this.pages(id, options)) yield* page.data;
  }

  /**
   * Yield pages `{ begin, end, data }` by long polls, from the cursor `after` to the end. `limit`
   * is the maximum size of a page in bytes of JSON, which one event may exceed.
   *
   * Requesting the next page acknowledges the last one. To survive a crash, store the results of
   * a page together with its `end`, and continue there. Acknowledged events cannot be read again,
   * and after the end the daemon forgets the evaluation.
   */
  async *pages(id, { after = "", wait = 25, limit, signal } = {}) {
    const options = { headers: { Accept: "application/json", Prefer: `wait=${wait}` } };
    const patience = 1000 * wait + PATIENCE;
    while (after !== null) {
      const size = limit === undefined ? "" : `&limit=${limit}`;
      const path = `${place(id)}/events?after=${after}${size}`;
      const { body, headers } = await this.#ask(path, options, { signal, patience });
      yield body;
      after = body.end;
      if (after !== null && body.data.length === 0 && !headers.has("Preference-Applied")) {
        await sleep(1000 * retryAfter(headers) || POLL_AGAIN, signal);
      }
    }
  }

  /**
   * Yield pages from a stream; resume the stream after a cut.
   *
   * A stream leaves the events to other readers: the daemon keeps them as far as its memory
   * reaches, and for some time after the end. If the events after a cut are discarded, this throws
   * a Refused, whose `problem.oldest` is the oldest usable cursor.
   */
  async *stream(id, { after = "", signal } = {}) {
    const options = { headers: { Accept: "text/event-stream" } };
    for (let failures = 0; ; ) {
      const silence = new Silence(SILENCE);
      const messages = new Messages(this.parse);
      let reader;
      let failure = new Error("the connection has ended");
      try {
        const path = `${place(id)}/events?after=${after}`;
        const answer = await this.#fetch(path, options, either(signal, silence.signal));
        if (failures > 0) this.notice(null);
        if (answer.status === 204) return; // there is nothing after this cursor
        reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
        while (!messages.ended) {
          const { value, done } = await reader.read();
          if (done) break;
          const data = messages.take(value);
          if (data.length > 0) {
            failures = 0;
            yield { begin: after || null, end: messages.cursor, data };
            after = messages.cursor;
          }
          silence.broken();
        }
      } catch (error) {
        signal?.throwIfAborted();
        if (!isPassing(error)) throw error;
        failure = error;
      } finally {
        silence.stop();
        reader?.cancel().catch(() => {});
      }
      if (messages.ended) return;
      failures += 1;
      await this.#pause(failures, failure, signal);
    }
  }

  /** Send a request up to `tries` times; return `{ body, headers }` of a success. */
  async #ask(path, options, { signal, tries = Infinity, patience = PATIENCE }) {
    for (let attempt = 1; ; attempt++) {
      try {
        const late = patience ? AbortSignal.timeout(patience) : undefined;
        const answer = await this.#fetch(path, options, either(signal, late));
        // A browser may take an answer for whole whose headers have broken off: there is no JSON.
        const body = answer.status === 204 ? null : this.parse(await answer.text());
        if (attempt > 1) this.notice(null);
        return { body, headers: answer.headers };
      } catch (error) {
        signal?.throwIfAborted();
        if (!isPassing(error) || attempt >= tries) throw error;
        await this.#pause(attempt, error, signal);
      }
    }
  }

  async #fetch(path, options, signal) {
    const headers = { ...Object.fromEntries(this.headers), ...options.headers };
    const url = new URL(path, this.server);
    const answer = await fetch(url, { ...options, headers, signal, cache: "no-store" });
    this.serverTime = Date.parse(answer.headers.get("Date")) || null;
    if (answer.ok) return answer;
    const problem = await answer.json().catch(() => ({})); // what a proxy says may be anything
    throw new Refused(answer.status, problem, retryAfter(answer.headers));
  }

  async #pause(attempt, error, signal) {
    const doubled = Math.min(FIRST_PAUSE * 2 ** (attempt - 1), LONGEST_PAUSE);
    const jittered = doubled * (0.5 + Math.random() / 2);
    const seconds = Math.max(error.retryAfter ?? 0, jittered / 1000);
    const why = error instanceof Refused ? error.message : "connection lost";
    this.notice({ why, seconds, attempt });
    await sleep(1000 * seconds, signal);
  }
}

/** Parser of server-sent events as the daemon sends them: lines end in "\n", data has one line. */
class Messages {
  constructor(parse) {
    this.parse = parse;
    this.cursor = null; // after the last event that was taken
    this.ended = false;
    this.rest = "";
  }

  /** Return the events that this chunk of the stream completes. */
  take(piece) {
    const messages = (this.rest + piece).split("\n\n");
    this.rest = messages.pop();
    const events = [];
    for (const message of messages) {
      let type = "message";
      let data;
      let cursor;
      for (const line of message.split("\n")) {
        if (line.startsWith("data: ")) data = line.slice(6);
        else if (line.startsWith("id: ")) cursor = line.slice(4);
        else if (line.startsWith("event: ")) type = line.slice(7);
      }
      if (type === "end") this.ended = true;
      if (type !== "message" || data === undefined) continue;
      events.push(this.parse(data));
      this.cursor = cursor;
    }
    return events;
  }
}

/** Aborts `signal` when `broken` was not called for so many milliseconds. */
class Silence {
  constructor(longest) {
    this.longest = longest;
    this.controller = new AbortController();
    this.signal = this.controller.signal;
    this.broken();
  }

  broken() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.controller.abort(), this.longest);
  }

  stop() {
    clearTimeout(this.timer);
  }
}

/** Whether a retry of the same request can succeed, after `error.retryAfter` seconds. */
export function isPassing(error) {
  if (!(error instanceof Refused)) return true; // no answer, or half of one
  return error.status >= 500 || error.status === 408 || error.status === 429;
}

function place(id) {
  return `evaluation/${encodeURIComponent(id)}`;
}

/** Return the seconds in `Retry-After`, 0 without it. (The daemon never sends a date.) */
function retryAfter(headers) {
  return Number(headers.get("Retry-After")) || 0;
}

/**
 * Return 128 random bits. (`crypto.randomUUID` exists only on pages served over TLS, and Node.js 18
 * has no global `crypto`. A key is no secret: it has to differ from the caller's other ones.)
 */
export function randomKey() {
  const bytes = new Uint8Array(16);
  if (globalThis.crypto) crypto.getRandomValues(bytes);
  else bytes.forEach((_, index) => (bytes[index] = Math.random() * 256));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

function either(...signals) {
  return AbortSignal.any(signals.filter(Boolean));
}

function sleep(milliseconds, signal) {
  return new Promise((resolve, reject) => {
    const aborted = () => {
      clearTimeout(timer);
      reject(signal.reason);
    };
    const timer = setTimeout(() => {
      signal?.removeEventListener("abort", aborted);
      resolve();
    }, milliseconds);
    if (signal?.aborted) aborted();
    else signal?.addEventListener("abort", aborted, { once: true });
  });
}
