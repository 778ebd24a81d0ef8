/** One evaluation as it is seen: its state, its events as they come, and its end. */

import { Client, isPassing } from "./client.js";
import { Console } from "./console.js";
import {
  announce,
  byId,
  bytes,
  copy,
  counted,
  duration,
  element,
  isBusy,
  said,
  setBusy,
} from "./dom.js";
import { Results } from "./results.js";
import { parse } from "./values.js";
import { summarize } from "./verdict.js";

const ASK_AGAIN = 1500; // ms between two looks at the status
const TICK = 200; // ms between two looks at the clock
const BUSY = 30; // ms of taking events before the browser may draw
const LIVE = ["queued", "fetching", "running"];
const DETAILS = {
  problem: "Problem",
  repository: "Repository",
  commit_oid: "Commit",
  directory: "Directory",
  evaluator_cmd: "Command",
  environment: "Environment",
  seed: "Seed",
  metadata: "Labels",
  limits: "Limits",
  created: "Accepted",
  fetching: "Fetching since",
  running: "Running since",
  ended: "Ended",
};
const MOMENTS = ["created", "fetching", "running", "ended"];
const SECONDS = ["wall_clock", "cpu"];
const SIZES = ["memory", "file_size", "disk", "output", "stderr"];

/** The part of the page that shows an evaluation; it shows one at a time. */
export class EvaluationView {
  /** `unauthorized` is called when the server wants another token. */
  constructor(unauthorized) {
    this.unauthorized = unauthorized;
    this.console = new Console(byId("output"), byId("dropped"));
    this.results = new Results();
    this.id = null;
    byId("cancel").addEventListener("click", () => this.#cancel());
    byId("rerun").addEventListener("click", () => this.#rerun());
    byId("copy-link").addEventListener("click", (event) => copy(event.target, location.href));
  }

  /** Show the evaluation `id` from its beginning, with `token`. */
  open(id, token) {
    this.close();
    this.id = id;
    this.token = token;
    this.stopping = new AbortController();
    const notice = (pause) => this.#showConnection(pause);
    this.client = new Client({ token, notice, parse });
    this.quiet = new Client({ token }); // of a lost connection the stream tells enough
    this.status = null;
    this.ended = false;
    this.error = null; // what the newest event says has gone wrong, if it is of that kind
    this.console.clear();
    this.results.clear();
    byId("nothing").hidden = true;
    byId("something").hidden = false;
    byId("identifier").textContent = id;
    byId("identifier").title = id;
    for (const name of ["connection", "failure"]) byId(name).hidden = true;
    this.#showResults(null, false);
    byId("details").hidden = true;
    byId("details").open = false;
    byId("rerun-error").textContent = "";
    for (const name of ["cancel", "rerun"]) {
      byId(name).hidden = true;
      setBusy(byId(name), false);
    }
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
      else this.#complain(error);
      this.#showState(error.status === 404 || error.status === 410 ? "gone" : "unknown");
      this.stopping.abort();
      clearInterval(this.ticking);
    }
  }

  async #follow(signal) {
    let after = "";
    let rested = performance.now();
    for (let over = false; !over; ) {
      try {
        for await (const page of this.client.stream(this.id, { after, signal })) {
          for (const event of page.data) this.#take(event);
          after = page.end;
          if (this.status?.state !== "running") this.wake?.(); // it does run, by now
          // What has arrived already would be taken without a pause. Timers of hidden pages are slow.
          if (!document.hidden && performance.now() - rested > BUSY) {
            await new Promise((resolve) => setTimeout(resolve));
            rested = performance.now();
          }
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
    this.results.cases.draw();
    const status = await this.client.status(this.id, { signal });
    const { error } = this;
    if (error !== null && status.state === "finished") this.results.add(error);
    else if (error !== null) this.#showFailure(error.message, error.stderr);
    this.#showStatus(status);
    this.ended = true;
  }

  #take({ type, payload }) {
    // Evaluators may send the like: it tells of the end only where it is the end.
    if (this.error !== null) this.results.add(this.error);
    this.error = null;
    if (type === "text") this.console.write(payload);
    else if (payload?.type !== "evaluation_error") this.results.add(payload);
    else if (payload.reason === "protocol") this.results.add(payload);
    else this.error = payload;
  }

  /** Ask for the status from time to time, until the events have come to their end. */
  async #watch(signal) {
    while (!this.ended) {
      let pause = ASK_AGAIN;
      try {
        const status = await this.quiet.status(this.id, { signal, tries: 1 });
        // Its end is shown when all that it has printed is there.
        if (!this.ended && LIVE.includes(status.state)) this.#showStatus(status);
      } catch (error) {
        if (!isPassing(error)) throw error;
        pause = Math.max(pause, 1000 * (error.retryAfter ?? 0));
      }
      await new Promise((resolve) => {
        this.wake = pause > ASK_AGAIN ? undefined : resolve; // never sooner than it is wanted
        setTimeout(resolve, pause);
      });
      signal.throwIfAborted();
    }
  }

  async #cancel() {
    const { signal } = this.stopping;
    const button = byId("cancel");
    if (isBusy(button)) return;
    setBusy(button, true);
    button.textContent = "Cancelling …";
    try {
      await this.client.cancel(this.id, { signal });
    } catch (error) {
      if (!signal.aborted) this.#complain(error);
    } finally {
      button.textContent = "Cancel";
      setBusy(button, false);
    }
  }

  /** Begin the same evaluation anew, and open it. */
  async #rerun() {
    const { signal } = this.stopping;
    const [button, error] = [byId("rerun"), byId("rerun-error")];
    if (isBusy(button)) return;
    setBusy(button, true);
    error.textContent = "";
    const notice = (pause) => {
      error.textContent = pause ? `Retrying in ${duration(pause.seconds)}: ${pause.why}` : "";
    };
    try {
      const client = new Client({ token: this.token, notice });
      const id = await client.rerun(this.id, undefined, { signal });
      location.hash = `#evaluation/${id}`;
      announce("The evaluation has started.");
    } catch (failure) {
      if (signal.aborted) return;
      if (failure.status === 401) this.unauthorized();
      else error.textContent = said(failure);
    } finally {
      if (!signal.aborted) setBusy(button, false);
    }
  }

  #showStatus(status) {
    if (status.state !== this.status?.state) {
      this.since = performance.now() - Math.max(0, Date.now() - Date.parse(status.created));
      this.#showState(status.state);
      this.#announceState(status);
      this.#showDetails(status);
    }
    this.status = status;
    const over = !LIVE.includes(status.state);
    this.#showResults(status.results, !over);
    if (over && byId("cancel") === document.activeElement) byId("evaluation").focus();
    byId("cancel").hidden = over;
    byId("rerun").hidden = !over;
    this.#showFacts();
  }

  /** Say it in one sentence, for a second one would come in the place of the first. */
  #announceState({ state, results }) {
    if (LIVE.includes(state)) return announce(`The evaluation is ${state}.`);
    const summary = summarize(results).map((words) => `, ${words}`).join("");
    if (state !== "failed") return announce(`The evaluation is ${state}${summary}.`);
    const reason = this.error?.message ? `: ${this.error.message}` : "";
    return announce(`The evaluation has failed${summary}${reason}.`);
  }

  /** Show the summary of the results, and a bar of the progress while the evaluation is live. */
  #showResults(results, live) {
    const text = summarize(results).join(" · ");
    byId("summary").hidden = text === "";
    if (byId("summary").textContent !== text) byId("summary").textContent = text;
    const { done, total } = results?.progress ?? { done: 0, total: 0 };
    byId("progress").hidden = !live || !(total > 0);
    if (byId("progress").hidden) return;
    const [bar, words] = byId("progress").children;
    bar.max = total;
    bar.value = done;
    words.textContent = `${done} of ${total}`;
  }

  /** Show what was asked for, with which limits, and when each state began. */
  #showDetails(status) {
    const members = Object.entries(DETAILS).flatMap(([name, words]) => {
      const texts = describe(name, status[name]).map((text) => element("dd", {}, text));
      return texts.length > 0 ? [element("dt", {}, words), ...texts] : [];
    });
    byId("details").hidden = false;
    byId("details").querySelector("dl").replaceChildren(...members);
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
        facts.push(place === 0 ? "next in the queue" : `${counted(place, "evaluation")} ahead`);
      }
      facts.push(live ? duration(seconds) : `total ${duration(seconds)}`);
      if (usage) facts.push(...usageFacts(usage));
      facts.push(`seed ${seed}`, `commit ${(status.commit_oid ?? "unknown").slice(0, 8)}`);
    }
    const text = facts.map((fact) => fact.replaceAll(" ", "\u00a0")).join(" · ");
    if (byId("facts").textContent !== text) byId("facts").textContent = text;
  }

  #showConnection(pause) {
    const line = byId("connection");
    if (pause === null) {
      if (!line.hidden) announce("Reconnected.");
      line.hidden = true;
      return;
    }
    if (line.hidden) announce("Connection lost, reconnecting.");
    line.hidden = false;
    const { why, attempt, seconds } = pause;
    line.textContent = `Reconnecting in ${duration(seconds)}, attempt ${attempt}: ${why}`;
  }

  /** Show what the server refuses, and say it. */
  #complain(error) {
    this.#showFailure(error.message);
    announce(error.message);
  }

  #showFailure(message = "The evaluation failed.", stderr = "") {
    const box = byId("failure");
    box.replaceChildren(element("p", {}, message));
    if (stderr) {
      const words = element("pre", { tabIndex: 0 }, stderr);
      box.append(element("details", { open: true }, element("summary", {}, "stderr"), words));
    }
    box.hidden = false;
  }
}

/** Return a member of the status in words, one text for each label or limit. */
function describe(name, value) {
  if (value === null || value === undefined || value === "") return [];
  if (MOMENTS.includes(name)) return [new Date(value).toLocaleString()];
  if (name === "environment") return [value.name, value.digest].filter(Boolean);
  if (name === "metadata") return Object.entries(value).map((pair) => pair.join(" = "));
  if (name !== "limits") return [String(value)];
  return Object.entries(value).map(([limit, most]) => {
    if (SIZES.includes(limit)) return `${limit} = ${bytes(Number(most))}`;
    return `${limit} = ${most}${SECONDS.includes(limit) ? " s" : ""}`;
  });
}

function usageFacts({ wall_seconds: wall, cpu_seconds: cpu, peak_memory_bytes: memory }) {
  const facts = [];
  if (wall !== null) facts.push(`ran ${duration(wall)}`);
  if (cpu !== null) facts.push(`CPU ${duration(cpu)}`);
  if (memory !== null) facts.push(`memory ${bytes(memory)}`);
  return facts;
}
