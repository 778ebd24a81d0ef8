/** One evaluation as it is seen: its state, its events as they come, and its end. */

import { Client, isPassing } from "./client.js";
import { Console } from "./console.js";
import { makeDetails, makeTimeline, usageFacts } from "./details.js";
import {
  announce,
  byId,
  copy,
  duration,
  element,
  isBusy,
  pauseWords,
  said,
  setBusy,
} from "./dom.js";
import { nameSubject } from "./history.js";
import { formatTime, say } from "./language.js";
import { Results } from "./results.js";
import { Search } from "./search.js";
import { Share } from "./share.js";
import { Source } from "./source.js";
import { parse } from "./values.js";
import { Tally, isCase, isLive, scoreWords, summarize, verdictOf } from "./verdict.js";

const ASK_AGAIN = 1500; // ms between two looks at the status
const TICK = 200; // ms between two looks at the clock
const BUSY = 30; // ms of taking events before the browser may draw
const LATER = 50; // ms in which results are gathered before their sum is shown
const LONGEST_ERRORS = 20_000; // characters of what compilers say

/** The part of the page that shows an evaluation; it shows one at a time. */
export class EvaluationView {
  /**
   * `unauthorized` is called when the server wants another token, `rerun` with the identifiers of a
   * rerun and of the evaluation that was run again, `opened` with the first status of each
   * evaluation, `edit` with the status and the submitted files, `mark` with what compilers have
   * said of them. `findDetails` returns the `titles` of problems, by name, and the `file` that was
   * submitted, if this browser knows it.
   */
  constructor({ unauthorized, rerun, opened, edit, mark, findDetails }) {
    Object.assign(this, { unauthorized, rerun, opened, mark, findDetails });
    this.source = new Source();
    this.search = new Search(byId("output"), {
      input: byId("search"),
      count: byId("search-count"),
      next: byId("search-next"),
      previous: byId("search-previous"),
    });
    this.console = new Console(byId("output"), byId("dropped"), {
      holds: () => this.search.isActive,
      changed: (node) => {
        this.source.link(node, true);
        this.search.refresh();
      },
    });
    this.results = new Results((cell) => this.source.link(cell));
    this.id = null;
    this.share = new Share(() => ({ id: this.id, token: this.token }));
    byId("cancel").addEventListener("click", () => this.#cancel());
    byId("rerun").addEventListener("click", () => this.#rerun());
    byId("edit").addEventListener("click", () => {
      edit(this.status, this.files);
      this.#markErrors();
    });
    byId("copy-link").addEventListener("click", (event) => copy(event.target, location.href));
  }

  /**
   * Show the evaluation `id` from its beginning, with `token`. If it is shared, the token is a link
   * that only reads it.
   */
  open(id, token, { isShared = false } = {}) {
    this.close();
    this.isShared = isShared;
    byId("something").classList.toggle("shared", isShared);
    byId("share").open = false;
    this.share.clear();
    this.id = id;
    this.token = token;
    this.stopping = new AbortController();
    const notice = (pause) => this.#showConnection(pause);
    this.client = new Client({ token, notice, parse });
    this.quiet = new Client({ token }); // of a lost connection the stream tells enough
    this.status = null;
    this.ended = false;
    this.error = null; // what the newest event says has gone wrong, if it is of that kind
    this.tally = new Tally();
    this.console.clear();
    this.search.clear();
    this.results.clear();
    this.source.clear();
    this.files = [];
    byId("compiler").hidden = true;
    byId("compiler").querySelector("pre").replaceChildren();
    byId("nothing").hidden = true;
    byId("something").hidden = false;
    byId("identifier").textContent = id;
    byId("identifier").title = id;
    byId("evaluation-name").textContent = say("Evaluation");
    byId("about").textContent = "";
    for (const name of ["connection", "failure"]) byId(name).hidden = true;
    byId("details").hidden = true;
    byId("details").open = false;
    byId("rerun-error").textContent = "";
    for (const name of ["cancel", "edit", "rerun"]) {
      byId(name).hidden = true;
      setBusy(byId(name), false);
    }
    this.#showState("opening", null);
    this.#showFacts();
    const { signal } = this.stopping;
    this.#run(() => this.#follow(signal), signal);
    this.#run(() => this.#watch(signal), signal);
    this.#showSource(signal);
    this.ticking = setInterval(() => this.#showFacts(), TICK);
  }

  /** Show it no longer; the evaluation goes on. */
  close() {
    this.stopping?.abort();
    clearInterval(this.ticking);
    clearTimeout(this.drawing);
    this.drawing = undefined;
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
      if (error.status === 401 && !this.isShared) this.unauthorized();
      else this.#complain(error);
      const state = error.status === 404 || error.status === 410 ? "gone" : "unknown";
      this.status = { ...this.status, state };
      this.#drawResults();
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
        this.tally = null; // only the status has all results
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

  #take(event) {
    const { type, payload } = event ?? {};
    // Evaluators may send the like: it tells of the end only where it is the end.
    if (this.error !== null) this.results.add(this.error);
    this.error = null;
    if (type === "text" && typeof payload === "string") this.console.write(payload);
    else if (payload?.type === "evaluation_error" && payload.reason !== "protocol") {
      this.error = payload;
    } else {
      this.results.add(payload);
      if (isCase(payload) && payload.verdict === "compile_error") this.#showErrors(payload);
      if (this.tally?.add(payload)) this.drawing ??= setTimeout(() => this.#drawResults(), LATER);
    }
  }

  /** Ask for the status from time to time, until the events have come to their end. */
  async #watch(signal) {
    while (!this.ended) {
      let pause = ASK_AGAIN;
      try {
        const status = await this.quiet.status(this.id, { signal, tries: 1 });
        // Its end is shown when all that it has printed is there.
        if (!this.ended && isLive(status.state)) this.#showStatus(status);
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
    button.textContent = say("Cancelling …");
    try {
      await this.client.cancel(this.id, { signal });
    } catch (error) {
      if (!signal.aborted) this.#complain(error);
    } finally {
      button.textContent = say("Cancel");
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
      error.textContent = pause ? say("Retrying in {time}: {why}", pauseWords(pause)) : "";
    };
    try {
      const client = new Client({ token: this.token, notice });
      const former = this.id;
      const evaluator = this.status?.problem ? "current" : undefined;
      const id = await client.rerun(former, undefined, { evaluator, signal });
      this.rerun(id, former);
      location.hash = `#evaluation/${id}`;
      announce(say("The evaluation has started."));
    } catch (failure) {
      if (signal.aborted) return;
      if (failure.status === 401) this.unauthorized();
      else error.textContent = said(failure);
    } finally {
      if (!signal.aborted) setBusy(button, false);
    }
  }

  /** Show what was submitted, if the server has kept it, and link messages to its lines. */
  async #showSource(signal) {
    let files;
    try {
      files = await this.quiet.submission(this.id, { signal });
    } catch {
      return; // the view is complete without
    }
    if (signal.aborted) return;
    this.files = files;
    this.source.show(files);
    this.source.link(byId("output"), true);
    this.source.link(byId("failure"));
    this.source.link(byId("compiler"));
    this.#markErrors();
    this.#offerEdit();
  }

  /** Show above all else what a compiler says, once for all cases. */
  #showErrors({ message }) {
    const place = byId("compiler").querySelector("pre");
    if (typeof message !== "string" || place.textContent !== "") return;
    place.textContent = message.slice(0, LONGEST_ERRORS);
    byId("compiler").hidden = message.trim() === "";
    this.source.link(place);
    this.#markErrors();
  }

  /** Mark in the form what the compiler says, where it has the text that was submitted. */
  #markErrors() {
    this.mark(this.source.findMarks(byId("compiler").querySelector("pre").textContent));
  }

  #offerEdit() {
    const isText = this.files.length > 0 && this.files.every(({ text }) => text !== undefined);
    byId("edit").hidden = !isText || this.status === null;
  }

  #showStatus(status) {
    const isNew = status.state !== this.status?.state;
    const isFirst = this.status === null;
    this.status = status;
    if (isFirst) {
      this.#showSubject(status);
      this.opened(status);
      this.#offerEdit();
      this.#markErrors();
    }
    if (isNew) {
      this.since = performance.now() - Math.max(0, Date.now() - Date.parse(status.created));
      this.#announceState(status);
      this.#showDetails(status);
    }
    this.#drawResults();
    const over = !isLive(status.state);
    if (over && byId("cancel") === document.activeElement) byId("evaluation").focus();
    byId("cancel").hidden = over;
    byId("rerun").hidden = !over;
    this.#showFacts();
  }

  /** Show what was evaluated, of whom, and when. */
  #showSubject(status) {
    const { titles, file } = this.findDetails(this.id);
    byId("evaluation-name").textContent = nameSubject(status, titles);
    const facts = [file, status.metadata?.student, status.caller]; // a label may name anybody
    if (status.problem !== null && !status.counts) facts.push(say("does not count"));
    facts.push(formatTime(status.created));
    byId("about").textContent = facts.filter(Boolean).join(" · ");
  }

  /** Say it in one sentence, for a second one would come in the place of the first. */
  #announceState({ state, results }) {
    const facts = [say(verdictOf({ state, results }).words)];
    if (!isLive(state)) facts.push(...summarize(results));
    if (state === "failed" && this.error?.message) facts.push(this.error.message);
    announce(`${facts.join(", ")}.`);
  }

  /** Show verdict and score: of the events that have come, and at the end those of the status. */
  #drawResults() {
    clearTimeout(this.drawing);
    this.drawing = undefined;
    const { state = "opening", results = null, ended = null } = this.status ?? {};
    const ofEvents = ended === null ? this.tally?.results : null;
    this.#showState(state, ofEvents ?? results);
  }

  /** Show what was asked for, with which limits, and how long each state took. */
  #showDetails(status) {
    const details = byId("details");
    details.hidden = false;
    details.querySelector("div").replaceChildren(...makeTimeline(status));
    details.querySelector("dl").replaceChildren(...makeDetails(status));
  }

  /** Show a state, the verdict, score and summary, and the progress while it is live. */
  #showState(state, results) {
    const { words, tone } = verdictOf({ state, results });
    showText(byId("state"), say(state));
    byId("state").dataset.state = state;
    showText(byId("verdict"), say(words));
    byId("verdict").dataset.tone = tone;
    showText(byId("score"), scoreWords(results));
    showText(byId("summary"), summarize(results && { ...results, score: null }).join(" · "));
    document.title = `${say(words)} · tawebeval`;
    const { done, total } = results?.progress ?? { done: 0, total: 0 };
    byId("progress").hidden = !isLive(state) || !(total > 0);
    if (byId("progress").hidden) return;
    const [bar, text] = byId("progress").children;
    bar.max = total;
    bar.value = done;
    showText(text, say("{done} of {total}", { done: Number(done), total: Number(total) }));
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
        const words = place === 0 ? "next in the queue" : "{n} evaluations ahead";
        facts.push(say(words, { n: Number(place) }));
      }
      facts.push(live ? duration(seconds) : say("total {time}", { time: duration(seconds) }));
      if (usage) facts.push(...usageFacts(usage));
      const commit = status.commit_oid?.slice(0, 8) ?? say("unknown");
      facts.push(say("seed {seed}", { seed: String(seed) }), say("commit {commit}", { commit }));
    }
    const text = facts.map((fact) => fact.replaceAll(" ", "\u00a0")).join(" · ");
    if (byId("facts").textContent !== text) byId("facts").textContent = text;
  }

  #showConnection(pause) {
    const line = byId("connection");
    if (pause === null) {
      if (!line.hidden) announce(say("Reconnected."));
      line.hidden = true;
      return;
    }
    if (line.hidden) announce(say("Connection lost, reconnecting."));
    line.hidden = false;
    const words = { ...pauseWords(pause), attempt: pause.attempt };
    line.textContent = say("Reconnecting in {time}, attempt {attempt}: {why}", words);
  }

  /** Show what the server refuses, and say it. */
  #complain(error) {
    this.#showFailure(said(error));
    announce(said(error));
  }

  #showFailure(message = say("The evaluation failed."), stderr = "") {
    const box = byId("failure");
    box.replaceChildren(element("p", {}, message));
    if (stderr) {
      const words = element("pre", { tabIndex: 0 }, stderr);
      box.append(element("details", { open: true }, element("summary", {}, "stderr"), words));
      this.source.link(box);
    }
    box.hidden = false;
  }
}

/** Show a text in an element, which is hidden without one. */
function showText(place, text) {
  place.hidden = text === "";
  if (place.textContent !== text) place.textContent = text;
}
