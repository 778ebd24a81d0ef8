/** One evaluation as it is seen: its state, its events as they come, and its end. */

import { Client, Refused } from "./client.js";
import { Console } from "./console.js";
import { announce, byId, bytes, copy, counted, duration, element } from "./dom.js";
import { Results } from "./results.js";
import { parse } from "./values.js";

const ASK_AGAIN = 1500; // ms between two looks at the status
const TICK = 200; // ms between two looks at the clock
const LIVE = ["queued", "fetching", "running"];

/** The part of the page that shows an evaluation; it shows one at a time. */
export class EvaluationView {
  /** `unauthorized` is called when the server wants another token. */
  constructor(unauthorized) {
    this.unauthorized = unauthorized;
    this.console = new Console(byId("output"), byId("dropped"));
    this.results = new Results();
    this.id = null;
    byId("cancel").addEventListener("click", () => this.#cancel());
    byId("copy-link").addEventListener("click", (event) => copy(event.target, location.href));
  }

  /** Show the evaluation `id` from its beginning, with `token`. */
  open(id, token) {
    this.close();
    this.id = id;
    this.stopping = new AbortController();
    const notice = (pause) => this.#showConnection(pause);
    this.client = new Client({ token, notice, parse });
    this.quiet = new Client({ token }); // of a lost connection the stream tells enough
    this.status = null;
    this.ended = false;
    this.console.clear();
    this.results.clear();
    byId("nothing").hidden = true;
    byId("something").hidden = false;
    byId("identifier").textContent = id;
    byId("identifier").title = id;
    for (const name of ["connection", "failure"]) byId(name).hidden = true;
    byId("cancel").hidden = true;
    byId("cancel").disabled = false;
    this.#showState("opening");
    this.#showFacts();
    const { signal } = this.stopping;
    this.#run(() => this.#follow(signal), signal);
    this.#run(() => this.#watch(signal), signal);
    this.ticking = setInterval(() => this.#showFacts(), TICK);
  }

  /** Show it no longer; the evaluation goes on. */
  close() {
    this.stopping?.abort();
    clearInterval(this.ticking);
    this.id = null;
    document.title = "tawebeval";
    byId("nothing").hidden = false;
    byId("something").hidden = true;
  }

  async #run(work, signal) {
    try {
      await work();
    } catch (error) {
      if (signal.aborted) return;
      this.#showConnection(null);
      if (error.status === 401) this.unauthorized();
      else this.#showFailure(error.message);
      this.#showState(error.status === 404 || error.status === 410 ? "gone" : "unknown");
      this.stopping.abort();
      clearInterval(this.ticking);
    }
  }

  async #follow(signal) {
    let after = "";
    for (let over = false; !over; ) {
      try {
        for await (const page of this.client.stream(this.id, { after, signal })) {
          for (const event of page.data) this.#take(event);
          after = page.end;
          if (this.status?.state !== "running") this.wake?.(); // it does run, by now
        }
        over = true;
      } catch (error) {
        const oldest = error.problem?.oldest;
        if (oldest === undefined) throw error;
        this.console.miss();
        after = oldest;
      }
    }
    this.console.draw();
    this.#showStatus(await this.client.status(this.id, { signal }));
    this.ended = true;
  }

  #take(event) {
    if (event.type === "text") return this.console.write(event.payload);
    const { payload } = event;
    const isFinal = payload?.type === "evaluation_error" && payload.reason !== "protocol";
    if (!isFinal) return this.results.add(payload);
    return this.#showFailure(payload.message ?? "The evaluation failed.", payload.stderr);
  }

  /** Ask for the status from time to time, until the events have come to their end. */
  async #watch(signal) {
    while (!this.ended) {
      try {
        const status = await this.quiet.status(this.id, { signal, tries: 1 });
        // Its end is shown when all that it has printed is there.
        if (!this.ended && LIVE.includes(status.state)) this.#showStatus(status);
      } catch (error) {
        if (error instanceof Refused && error.status < 500 && error.status !== 429) throw error;
      }
      await new Promise((resolve) => {
        this.wake = resolve;
        setTimeout(resolve, ASK_AGAIN);
      });
      signal.throwIfAborted();
    }
  }

  async #cancel() {
    const { signal } = this.stopping;
    byId("cancel").disabled = true;
    byId("cancel").textContent = "Cancelling …";
    try {
      await this.client.cancel(this.id, { signal });
    } catch (error) {
      if (!signal.aborted) this.#showFailure(error.message);
    } finally {
      byId("cancel").textContent = "Cancel";
      byId("cancel").disabled = false;
    }
  }

  #showStatus(status) {
    if (status.state !== this.status?.state) {
      this.since = performance.now() - Math.max(0, Date.now() - Date.parse(status.created));
      this.#showState(status.state);
      const { summary } = this.results;
      const goals = LIVE.includes(status.state) || !summary ? "" : `, ${summary}`;
      announce(`The evaluation is ${status.state}${goals}.`);
    }
    this.status = status;
    byId("cancel").hidden = !LIVE.includes(status.state);
    this.#showFacts();
  }

  #showState(state) {
    byId("state").textContent = state;
    byId("state").dataset.state = state;
    document.title = `${state} · tawebeval`;
  }

  #showFacts() {
    const facts = [];
    const { status } = this;
    if (status !== null) {
      const { created, ended, queue_place: place, usage, seed } = status;
      const live = ended === null;
      const seconds = live
        ? (performance.now() - this.since) / 1000
        : (Date.parse(ended) - Date.parse(created)) / 1000;
      if (status.state === "queued" && place !== null) {
        facts.push(place === 0 ? "next in the queue" : `${counted(place, "place")} before it`);
      }
      facts.push(live ? duration(seconds) : `${duration(seconds)} in all`);
      if (usage) facts.push(...usageFacts(usage));
      facts.push(`seed ${seed}`, `commit ${status.commit_oid.slice(0, 8)}`);
    }
    const text = facts.map((fact) => fact.replaceAll(" ", "\u00a0")).join(" · ");
    if (byId("facts").textContent !== text) byId("facts").textContent = text;
  }

  #showConnection(pause) {
    const line = byId("connection");
    if (pause === null) {
      if (!line.hidden) announce("Connected again.");
      line.hidden = true;
      return;
    }
    if (line.hidden) announce("The connection was lost, and is tried again.");
    line.hidden = false;
    const { why, attempt, seconds } = pause;
    line.textContent = `Reconnecting: ${why}. Attempt ${attempt}, in ${duration(seconds)}.`;
  }

  #showFailure(message, stderr = "") {
    const box = byId("failure");
    box.replaceChildren(element("p", {}, message));
    if (stderr) {
      const words = element("pre", { tabIndex: 0 }, stderr);
      box.append(element("details", { open: true }, element("summary", {}, "stderr"), words));
    }
    box.hidden = false;
    announce(message);
  }
}

function usageFacts({ wall_seconds: wall, cpu_seconds: cpu, peak_memory_bytes: memory }) {
  const facts = [];
  if (wall !== null) facts.push(`ran ${duration(wall)}`);
  if (cpu !== null) facts.push(`processor ${duration(cpu)}`);
  if (memory !== null) facts.push(`memory ${bytes(memory)}`);
  return facts;
}
