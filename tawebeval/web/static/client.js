/**
 * A client of tawebeval: begins evaluations, and follows their events.
 *
 *     import { Client } from "https://judge.example.org/static/client.js";
 *
 *     const client = new Client({ token });
 *     const id = await client.evaluate(new FormData(form));
 *     for await (const event of client.events(id)) show(event);
 *
 * Two rules keep it from losing an event, or having one twice: what follows is asked for when
 * what came last was taken, not before; and a request that was not answered, or not to its end,
 * is repeated as it was. The daemon keeps whatever no later request has acknowledged.
 */

const PATIENCE = 30_000; // ms that an answer may take, beyond the time for which it is to wait
const SILENCE = 60_000; // ms after which a stream is taken for dead; a living one shows it sooner
const FIRST_PAUSE = 250; // ms before the second attempt; it doubles for each further one
const LONGEST_PAUSE = 10_000; // ms, where the server does not want a longer one
const POLL_AGAIN = 500; // ms after an empty page of a server that does not wait

/** An answer that is no success: `status` is its number, `problem` the document (RFC 9457). */
export class Refused extends Error {
  constructor(status, problem, retryAfter) {
    super(problem.message ?? problem.detail ?? `the server answers with the status ${status}`);
    this.name = "Refused";
    this.status = status;
    this.problem = problem;
    this.retryAfter = retryAfter; // seconds, 0 if the server does not say
  }
}

/** One daemon, for one caller. */
export class Client {
  /**
   * `server` is the daemon's URL with a slash at the end; by default it is where this file is
   * from. `token` is sent with each request, unless it is empty. `notice` is called with
   * `{ why, seconds, attempt }` before each pause after which a request is repeated, and with
   * null when the server answers again. `parse` reads JSON; another one than `JSON.parse` may
   * keep the digits of large numbers. Throws TypeError for a token that no header can carry.
   *
   * All methods take an AbortSignal, `signal`, and throw its reason when it is aborted. They
   * throw Refused where repeating would not help, and whatever was wrong at last after `tries`.
   */
  constructor({ server, token = "", notice = () => {}, parse = JSON.parse } = {}) {
    this.server = new URL(server ?? new URL("..", import.meta.url));
    this.headers = new Headers(token ? { Authorization: `Bearer ${token}` } : {});
    this.notice = notice;
    this.parse = parse;
  }

  /** Begin an evaluation with a FormData, once however often it is sent; return its identifier. */
  async evaluate(form, { signal, tries = 8 } = {}) {
    const headers = { "Idempotency-Key": randomKey() };
    const options = { method: "POST", body: form, headers };
    const { body } = await this.#ask("evaluate", options, { signal, tries, patience: 0 });
    return body.evaluation_id;
  }

  /** Return the status document. This acknowledges nothing. */
  async status(id, { signal, tries = 8 } = {}) {
    return (await this.#ask(place(id), {}, { signal, tries })).body;
  }

  /** End an evaluation; return when nothing is left of it but its events. */
  async cancel(id, { signal, tries = 8 } = {}) {
    await this.#ask(place(id), { method: "DELETE" }, { signal, tries });
  }

  /** Yield the caller's own evaluations, in the order in which they were accepted. */
  async *evaluations({ signal, tries = 8 } = {}) {
    for (let after = ""; after !== null; ) {
      const { body } = await this.#ask(`evaluations?after=${after}`, {}, { signal, tries });
      yield* body.data;
      after = body.end;
    }
  }

  /** Yield the events, each once and in order, to the last one: those of `pages`. */
  async *events(id, options) {
    for await (const page of this.pages(id, options)) yield* page.data;
  }

  /**
   * Yield pages `{ begin, end, data }` by long polls, from the cursor `after` to the end. A page
   * has up to `limit` bytes of events as JSON, or one event; without it the daemon's own limit.
   *
   * A page is acknowledged when the next one is asked for. So store what has to survive this
   * page together with `end`, which is where to go on. Nothing is lost on any line; but nobody
   * can have again what was acknowledged, and after the end the daemon forgets the evaluation.
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
   * Yield pages by a stream, which is resumed from where it has broken off.
   *
   * A stream leaves the events to others, and to those who come again: the daemon keeps them as
   * far as its memory reaches, and for some time after the end. Where it does not reach back to
   * what was lost on a bad line, this throws a Refused, of which `problem.oldest` is the oldest
   * cursor that there is. So something may be lost, but never without a word.
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

  /** Return what is `{ body, headers }` of a success, after as many attempts as are allowed. */
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
    if (answer.ok) return answer;
    const problem = await answer.json().catch(() => ({})); // what a proxy says may be anything
    throw new Refused(answer.status, problem, retryAfter(answer.headers));
  }

  async #pause(attempt, error, signal) {
    const doubled = Math.min(FIRST_PAUSE * 2 ** (attempt - 1), LONGEST_PAUSE);
    const jittered = doubled * (0.5 + Math.random() / 2);
    const seconds = Math.max(error.retryAfter ?? 0, jittered / 1000);
    const why = error instanceof Refused ? error.message : "the connection was lost";
    this.notice({ why, seconds, attempt });
    await sleep(1000 * seconds, signal);
  }
}

/** Server-sent events, as far as the daemon uses them: lines end in "\n", data has one line. */
class Messages {
  constructor(parse) {
    this.parse = parse;
    this.cursor = null; // after the last event that was taken
    this.ended = false;
    this.rest = "";
  }

  /** Return the events that are complete with this piece of the stream. */
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

/** Aborts `signal` when it was not broken for so many milliseconds. */
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

/** Whether the same request may be answered when it is made again, later by its `retryAfter`. */
export function isPassing(error) {
  if (!(error instanceof Refused)) return true; // no answer, or half of one
  return error.status >= 500 || error.status === 408 || error.status === 429;
}

function place(id) {
  return `evaluation/${encodeURIComponent(id)}`;
}

/** The seconds that an answer says to wait, 0 if it does not. (We never send it as a date.) */
function retryAfter(headers) {
  return Number(headers.get("Retry-After")) || 0;
}

/** 128 random bits. (`crypto.randomUUID` is there only on pages that came over TLS.) */
function randomKey() {
  const bytes = crypto.getRandomValues(new Uint8Array(16));
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
