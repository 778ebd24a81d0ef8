/** The caller's own evaluations, or those that this browser has submitted, the newest first. */

import { Client, Refused, isPassing } from "./client.js";
import {
  announce,
  byId,
  copy,
  duration,
  element,
  isBusy,
  said,
  setBusy,
  setOptions,
} from "./dom.js";
import { ageWords, nameSubject } from "./history.js";
import { formatTime, say } from "./language.js";
import { complaintOf } from "./validity.js";
import { isLive, scoreWords, verdictOf } from "./verdict.js";

const ASK_AGAIN = 4000; // ms
const MOST = 300; // rows
const ACTIONS = { ".danger": "Cancel", ".again": "Run again", ".copy-link": "Copy link" };

/** Sort entries, which may be of several daemons, by time of acceptance; keep the last ones. */
function keepNewest(entries) {
  entries.sort((one, other) => Date.parse(one.created) - Date.parse(other.created));
  entries.splice(0, Math.max(0, entries.length - MOST));
}

/** A table that keeps itself up to date while it is open. */
export class Listing {
  /**
   * `unauthorized` is called when the server wants a token, `rerun` with the identifiers of a rerun
   * and of the evaluation that was run again.
   */
  constructor(unauthorized, rerun) {
    this.unauthorized = unauthorized;
    this.rerun = rerun;
    this.rows = new Map(); // by identifier
    this.titles = new Map(); // of problems, by name
    this.filters = byId("filters");
    this.filters.noValidate = true; // the page has better words than browsers
    this.filters.addEventListener("change", () => {
      if (!this.#checkLabel()) return;
      this.open(this.token, { history: this.history, isLocal: this.isLocal });
    });
    this.filters.addEventListener("submit", (event) => event.preventDefault());
  }

  /** Offer these problems to filter by. */
  offer({ problems, me }) {
    const { problem, caller } = this.filters.elements;
    const members = Object.values(me.supervises).flat();
    this.own = members.length > 0 ? me.caller : undefined;
    const names = [...new Set(members)].sort().map((name) => [name, name]);
    const choices = [[me.caller, say("only yours")], ["", say("all")], ...names];
    setOptions(caller, members.length > 0 ? choices : []);
    if (members.length > 0) caller.value = me.caller; // and not those of a thousand students
    caller.closest(".field").hidden = members.length === 0;
    this.titles = new Map(problems.map(({ name, title }) => [name, title || name]));
    setOptions(problem, [["", say("all")], ...this.titles]);
    problem.closest(".field").hidden = problems.length === 0;
  }

  /**
   * Begin to show what there is, with `token`. `history` has what this browser has submitted,
   * `[{ id, file }]`; if `isLocal`, the token may not list evaluations, and only these are shown.
   */
  open(token, { history = [], isLocal = false } = {}) {
    this.#take(token, { history, isLocal });
    this.#refresh(this.stopping.signal);
  }

  #take(token, { history, isLocal }) {
    this.close();
    if (token !== this.token) {
      this.gone = new Set(); // of the history
      this.known = new Map(); // documents of the history that do not change any more
    }
    this.token = token;
    this.history = history;
    this.isLocal = isLocal;
    this.files = new Map(history.map(({ id, file }) => [id, file]));
    this.stopping = new AbortController();
    this.client = new Client({ token });
  }

  /** Ask for nothing any more. */
  close() {
    this.stopping?.abort();
  }

  async #refresh(signal) {
    while (!signal.aborted) {
      let pause = ASK_AGAIN;
      try {
        if (!document.hidden) await this.#update(signal);
      } catch (error) {
        if (signal.aborted) return;
        byId("listing-hint").textContent = said(error);
        if (error.status === 401) this.unauthorized();
        // 400: the daemon has lost its store, and the list begins again.
        if (!isPassing(error) && error.status !== 400) return;
        pause = Math.max(pause, 1000 * (error.retryAfter ?? 0));
      }
      await new Promise((resolve) => setTimeout(resolve, pause));
    }
  }

  async #update(signal) {
    const entries = [];
    let missing = [];
    const away = (names) => (missing = names);
    const wanted = { ...this.#filter(), signal, tries: 1, away };
    for await (const entry of this.#find(wanted)) {
      entries.push(entry);
      if (entries.length > 2 * MOST) keepNewest(entries);
    }
    keepNewest(entries);
    this.#show(entries.reverse(), missing);
  }

  /** Yield evaluations as `open` would show them, all for once, for as long as it is not opened. */
  async *find(token, { history, isLocal }) {
    this.#take(token, { history, isLocal });
    yield* this.#find({ signal: this.stopping.signal, tries: 1, caller: this.own });
  }

  #find(wanted) {
    return this.isLocal ? this.#readHistory(wanted) : this.client.evaluations(wanted);
  }

  /** Yield the status of what this browser has submitted, and the server still knows. */
  async *#readHistory({ signal, ...wanted }) {
    for (const { id } of this.history) {
      if (this.gone.has(id)) continue;
      try {
        const status = this.known.get(id) ?? (await this.client.status(id, { signal, tries: 1 }));
        if (!isLive(status.state)) this.known.set(id, status);
        if (isWanted(status, wanted)) yield status;
      } catch (error) {
        if (!(error instanceof Refused) || ![404, 410].includes(error.status)) throw error;
        this.gone.add(id);
      }
    }
  }

  #checkLabel() {
    const { label } = this.filters.elements;
    const isValid = label.validity.valid;
    label.ariaInvalid = isValid ? null : "true";
    byId("filter-error").textContent = isValid ? "" : complaintOf(label);
    return isValid;
  }

  #filter() {
    const { state, caller, problem, since, label } = Object.fromEntries(new FormData(this.filters));
    const filter = {};
    if (state) filter.state = state;
    if (caller) filter.caller = caller;
    if (problem) filter.problem = problem;
    if (since) filter.since = new Date(Date.now() - 1000 * since);
    const [, name, value] = /^([^=]+)=(.+)$/.exec(label.trim()) ?? [];
    if (name !== undefined) filter.metadata = { [name]: value };
    return filter;
  }

  /** Show these and no others; rows that stay are changed in place, with what has the focus. */
  #show(entries, missing) {
    const hint = byId("listing-hint");
    const { length } = entries;
    let found = length ? say("{n} evaluations", { n: length }) : say("No evaluations.");
    const names = missing.join(", ");
    if (missing.length) found += ` ${say("Incomplete: no answer from {names}.", { names })}`;
    if (hint.textContent !== found) hint.textContent = found;
    const rows = entries.map((entry) => {
      const row = this.rows.get(entry.evaluation_id) ?? this.#row(entry.evaluation_id);
      this.#fill(row, entry);
      return [entry.evaluation_id, row];
    });
    const body = byId("listing");
    const kept = new Map(rows);
    for (const [id, row] of this.rows) {
      if (kept.has(id)) continue;
      if (row.contains(document.activeElement)) body.closest(".scroll").focus();
      row.remove();
    }
    this.rows = kept;
    let place = body.firstElementChild;
    for (const row of kept.values()) {
      if (row === place) place = place.nextElementSibling;
      else body.insertBefore(row, place);
    }
  }

  async #cancel(id, button) {
    if (isBusy(button)) return;
    setBusy(button, true);
    try {
      await this.client.cancel(id);
      announce(say("The evaluation {id} is cancelled.", { id: id.slice(0, 10) }));
    } catch (error) {
      byId("listing-hint").textContent = said(error);
    } finally {
      setBusy(button, false);
    }
  }

  async #rerun(id, button) {
    if (isBusy(button)) return;
    setBusy(button, true);
    try {
      const evaluator = button.dataset.problem ? "current" : undefined;
      const again = await this.client.rerun(id, undefined, { evaluator, tries: 2 });
      this.rerun(again, id);
      location.hash = `#evaluation/${again}`;
      announce(say("The evaluation has started."));
    } catch (error) {
      byId("listing-hint").textContent = said(error);
    } finally {
      setBusy(button, false);
    }
  }

  #row(id) {
    const link = element("a", { href: `#evaluation/${id}`, title: id });
    const share = element("button", { type: "button", className: "small copy-link" }, say("Copy link"));
    share.addEventListener("click", () => copy(share, link.href));
    const cancel = element("button", { type: "button", className: "small danger" }, say("Cancel"));
    cancel.addEventListener("click", () => this.#cancel(id, cancel));
    const rerun = element("button", { type: "button", className: "small again" }, say("Run again"));
    rerun.addEventListener("click", () => this.#rerun(id, rerun));
    const names = ["", "sum", "begun", "time"];
    const cells = names.map((name) => element("td", { className: name }));
    cells[0].append(element("span", { className: "state" }));
    cells[0].append(" ", element("span", { className: "verdict" }));
    return element(
      "tr",
      {},
      element("th", { scope: "row" }, link, element("p", { className: "labels hint" })),
      ...cells,
      element("td", {}, element("div", { className: "actions" }, cancel, rerun, share)),
    );
  }

  #fill(row, entry) {
    const { evaluation_id: id, state, metadata, created, ended, results } = entry;
    const link = row.querySelector("a");
    const subject = nameSubject(entry, this.titles);
    if (link.textContent !== subject) link.textContent = subject;
    row.querySelector(".again").dataset.problem = entry.problem ?? "";
    const labels = Object.entries(metadata).map((pair) => pair.join(" = "));
    const owner = this.own !== undefined && entry.caller !== this.own ? entry.caller : null;
    const isUncounted = entry.problem !== null && !entry.counts;
    if (isUncounted) labels.unshift(say("does not count"));
    labels.unshift(...[owner, this.files.get(id)].filter(Boolean));
    row.querySelector(".labels").textContent = labels.join(", ");
    row.querySelector(".labels").title = labels.join("\n");
    row.querySelector(".labels").dataset.age = ageWords(created); // where its column has no room
    const { words, tone } = verdictOf({ state, results });
    const verdict = row.querySelector(".verdict");
    const tells = state === "finished" && tone !== "plain"; // more than the state beside it
    verdict.textContent = tells ? say(words) : "";
    verdict.dataset.tone = tells ? tone : "plain";
    const score = scoreWords(results);
    row.querySelector(".sum").textContent = score;
    if (score !== "") verdict.dataset.score = score; // shown where the column has no room
    const badge = row.querySelector(".state");
    badge.textContent = say(state);
    badge.hidden = tells; // one verdict, not two
    badge.dataset.state = state;
    row.querySelector(".begun").textContent = ageWords(created);
    const time = formatTime(created);
    row.querySelector(".begun").title = time;
    for (const [name, what] of Object.entries(ACTIONS)) {
      const about = [subject, ...labels.slice(0, 1), time].join(", "); // as the row is named
      row.querySelector(name).ariaLabel = `${say(what)} ${about}`;
    }
    const until = ended === null ? Date.now() : Date.parse(ended);
    const seconds = Math.max(0, until - Date.parse(created)) / 1000;
    row.querySelector(".time").textContent = duration(seconds);
    const cancel = row.querySelector(".danger");
    if (ended !== null && cancel === document.activeElement) row.querySelector("a").focus();
    cancel.hidden = ended !== null;
    row.querySelector(".again").hidden = ended === null;
  }
}

/** Whether a status is of what the filter wants. */
function isWanted({ state, problem, created, metadata }, wanted) {
  return (
    (wanted.state === undefined || wanted.state === state) &&
    (wanted.problem === undefined || wanted.problem === problem) &&
    (wanted.since === undefined || Date.parse(created) >= wanted.since.getTime()) &&
    Object.entries(wanted.metadata ?? {}).every(([name, text]) => metadata[name] === text)
  );
}
