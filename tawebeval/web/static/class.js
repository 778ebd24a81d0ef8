/** The view of a class: submissions of many students for a problem, their verdicts, and CSV. */

import { Client, randomKey } from "./client.js";
import { saveCsv } from "./csv.js";
import { announce, byId, element, pauseWords, said, setOptions } from "./dom.js";
import { say } from "./language.js";
import { assignFiles, findStudents } from "./students.js";
import { parse } from "./values.js";
import { Tally, goalWords, isLive, scoreWords, verdictOf } from "./verdict.js";
import {
  BadZip,
  MOST_BYTES,
  MOST_FILES,
  cleanPath,
  isZipName,
  putInto,
  readZip,
  takeRoom,
  unpackZips,
} from "./zip.js";

const AT_ONCE = 4; // evaluations; browsers open six connections to a server
const READING = "Reading …";
const LABEL = 256; // bytes of a label's text
const DRAW = 100; // ms between two looks of a row at its results
const ENDED = ["finished", "failed", "cancelled"];

/** The table of a class, and what evaluates it. */
export class ClassView {
  /** `findToken` returns the token to submit with. */
  constructor(findToken) {
    this.findToken = findToken;
    this.problems = [];
    this.rows = [];
    this.former = []; // rows of what was evaluated before
    this.sources = [];
    this.reading = Promise.resolve(); // of all that was given
    this.sorted = { by: "name", isUp: true };
    byId("class-problem").addEventListener("change", () => this.#choose());
    byId("class-zip").addEventListener("change", ({ target }) => this.#takeInput(target));
    byId("class-folder").addEventListener("change", ({ target }) => this.#takeInput(target));
    byId("class-start").addEventListener("click", () => {
      this.#start(this.rows.filter((row) => row.isOpen));
    });
    byId("class-rerun").addEventListener("click", () => {
      this.#start(this.rows.filter((row) => row.isOver), { again: true });
    });
    for (const button of byId("class-table").querySelectorAll("thead button")) {
      button.addEventListener("click", () => this.#sort(button.dataset.sort));
    }
    byId("class-stop").addEventListener("click", () => this.stopping?.abort());
    byId("class-clear").addEventListener("click", () => this.#clear());
    byId("class-csv").addEventListener("click", () => this.#save());
    addEventListener("drop", (event) => {
      if (byId("class-view").hidden) return;
      event.preventDefault();
      this.#read(() => readDrop(event.dataTransfer));
    });
    this.#show();
  }

  /** Offer these problems to the caller `me`; another token may permit others. */
  offer({ problems, me }) {
    this.stopping?.abort();
    this.problems = problems;
    const isOther = me.caller !== this.caller;
    if (isOther) [this.former, this.rows, this.restored] = [[], [], undefined];
    this.caller = me.caller;
    const options = problems.map(({ name, title }) => [name, title || name]);
    setOptions(byId("class-problem"), options);
    if (isOther || byId("class-problem").value !== this.arranged) this.#arrange();
  }

  /** Show the view, with what was evaluated before for the problem, also by another browser. */
  open() {
    if (this.restored !== this.arranged) this.#restore();
  }

  #choose() {
    this.#arrange();
    this.#restore();
  }

  /**
   * Make rows of the evaluations that have the label of a student; of each student the last. Only
   * the caller's own count: the members of a supervised group could name any student.
   */
  async #restore() {
    const [problem, caller] = [this.arranged, this.caller];
    this.restored = problem;
    const entries = new Map();
    try {
      const client = new Client({ token: this.findToken() });
      const wanted = { problem, caller: caller ?? undefined, tries: 2 };
      for await (const entry of client.evaluations(wanted)) {
        if (entry.metadata.student) entries.set(entry.metadata.student, entry);
      }
    } catch {
      if (this.restored === problem) this.restored = undefined; // to be tried again
      return; // a token that lists nothing, or an answer that is away
    }
    if (problem !== this.arranged || caller !== this.caller) return;
    if (this.stopping !== undefined) return (this.restored = undefined);
    this.former = [...entries].map(([name, entry]) => Row.restore(name, entry));
    this.#arrange();
    const live = this.rows.filter((row) => row.id !== null && isLive(row.state));
    if (live.length > 0) this.#start(live);
  }

  #takeInput(input) {
    const files = [...input.files].map((file) => ({
      path: file.webkitRelativePath || file.name,
      content: file,
    }));
    input.value = "";
    this.#read(async () => files);
  }

  /** Add what `find` returns, after what was given before. */
  #read(find) {
    if (this.stopping !== undefined) return;
    byId("class-hint").textContent = say(READING);
    const found = Promise.allSettled([find(), this.reading]);
    this.reading = found.then(([{ value, reason }]) => this.#add(value, reason));
  }

  /** Add files, unpacked, or show an `error`; each dropped thing keeps a name of its own. */
  async #add(files, error) {
    const hint = byId("class-hint");
    try {
      if (error !== undefined) throw error;
      const left = { files: MOST_FILES, bytes: MOST_BYTES };
      for (const { content } of this.sources) takeRoom(left, content?.size ?? 0);
      const names = new Map(); // of what was dropped at the top, as it is called here
      for (const { path } of this.sources) names.set(path.split("/")[0], "");
      const found = [];
      const given = new Map();
      for (const { path, content, group } of files) {
        const [top, ...rest] = path.split("/");
        const isZip = content !== null && rest.length === 0 && isZipName(top);
        const key = group ?? (rest.length === 0 ? content : top);
        if (!given.has(key)) given.set(key, makeName(isZip ? top.slice(0, -4) : top, names));
        const name = given.get(key);
        if (isZip) found.push(...putInto(name, await unzip(content, top, left)));
        else if (cleanPath(path) !== null) {
          takeRoom(left, content?.size ?? 0);
          found.push({ path: [name, ...rest].join("/"), content });
        }
      }
      this.sources.push(...(await unpackZips(found, left)));
      if (hint.textContent === say(READING)) hint.textContent = "";
      this.#arrange();
    } catch (failure) {
      hint.textContent = say("Not read: {why}", { why: failure.message });
    }
  }

  /** Find the students, by the fields of the problem; keep the rows of those who are the same. */
  #arrange() {
    const { name, fields, extensions } = this.#problem ?? { name: "", fields: [], extensions: [] };
    if (this.stopping !== undefined) return;
    if (name !== this.arranged) [this.former, this.rows] = [[], []];
    const former = new Map([...this.former, ...this.rows].map((row) => [row.name, row]));
    this.arranged = name;
    const rows = findStudents(this.sources, Math.max(1, fields.length)).map((student) => {
      const assigned = assignFiles(student.files, fields, extensions);
      const row = former.get(student.name);
      const isNew = student.files.length > 0 && !row?.submits(assigned);
      return row === undefined || isNew ? new Row(student, assigned) : row;
    });
    const names = new Set(rows.map((row) => row.name));
    this.rows = [...rows, ...this.former.filter((row) => !names.has(row.name))];
    this.#place();
    this.#show();
  }

  #sort(by) {
    this.sorted = { by, isUp: this.sorted.by === by ? !this.sorted.isUp : by === "name" };
    this.#place();
  }

  /** Put the rows in order. */
  #place() {
    const { by, isUp } = this.sorted;
    this.rows.sort((one, other) => {
      const [a, b] = [one.sortKey(by), other.sortKey(by)];
      const order = typeof a === "number" ? a - b : a.localeCompare(b);
      return (isUp ? order : -order) || one.name.localeCompare(other.name);
    });
    byId("class-rows").replaceChildren(...this.rows.map(({ place }) => place));
    for (const button of byId("class-table").querySelectorAll("thead button")) {
      const isBy = button.dataset.sort === by;
      button.closest("th").ariaSort = isBy ? (isUp ? "ascending" : "descending") : null;
    }
  }

  get #problem() {
    return this.problems.find(({ name }) => name === byId("class-problem").value);
  }

  #clear() {
    this.sources = [];
    this.former = [];
    byId("class-hint").textContent = "";
    this.#arrange();
  }

  #show() {
    const isBusy = this.stopping !== undefined;
    const open = this.rows.filter((row) => row.isOpen).length;
    byId("class-start").hidden = isBusy || open === 0;
    byId("class-start").textContent = say("Evaluate {n} submissions", { n: open });
    const over = this.rows.filter((row) => row.isOver).length;
    byId("class-rerun").hidden = isBusy || over === 0;
    byId("class-rerun").textContent = say("Evaluate {n} submissions again", { n: over });
    byId("class-stop").hidden = !isBusy;
    byId("class-clear").hidden = isBusy || this.rows.length === 0;
    byId("class-csv").hidden = this.rows.length === 0;
    byId("class-table").hidden = this.rows.length === 0;
    byId("class-problem").disabled = isBusy;
    const done = say("{over} of {n} students evaluated", { over, n: this.rows.length });
    byId("class-count").textContent = this.rows.length === 0 ? "" : done;
  }

  /** Evaluate rows, or those that are evaluated `again`: the same files, by the problem as it is. */
  async #start(waiting, { again = false } = {}) {
    if (this.stopping !== undefined) return;
    this.stopping = new AbortController();
    const { signal } = this.stopping;
    const [problem, token] = [this.arranged, this.findToken()];
    const before = new Map(waiting.map((row) => [row, row.state]));
    for (const row of waiting) row.show("waiting");
    const pressed = ["class-start", "class-rerun", "class-problem"]; // which go, or are disabled
    const hasFocus = pressed.includes(document.activeElement.id);
    this.#show();
    if (hasFocus) byId("class-stop").focus();
    const work = async () => {
      while (waiting.length > 0 && !signal.aborted) {
        const row = waiting.shift();
        await row.evaluate(problem, token, signal, again ? before.get(row) : null);
        this.#show();
      }
    };
    await Promise.all(Array.from({ length: AT_ONCE }, work));
    for (const row of waiting) row.show(before.get(row));
    this.stopping = undefined;
    const isNext = document.activeElement === byId("class-stop");
    this.#arrange(); // with what was given, or chosen, meanwhile
    announce(byId("class-count").textContent);
    if (isNext) byId(signal.aborted ? "class-start" : "class-csv").focus();
  }

  #save() {
    const head = ["student", "problem", "verdict", "score", "maximum", "state", "message"];
    const goals = [...new Set(this.rows.flatMap((row) => Object.keys(row.results?.goals ?? {})))];
    const rows = this.rows.map((row) => row.cells(this.arranged, goals));
    const name = `${this.arranged || "class"}.csv`;
    saveCsv(name, [[...head, "evaluation", ...goals], ...rows]);
  }
}

/** One student: what is submitted, and what became of it. */
export class Row {
  constructor({ name, files }, { pairs = [], wrong = "" }) {
    this.name = name;
    this.pairs = pairs;
    this.wrong = wrong;
    this.id = null;
    this.key = randomKey();
    this.state = "";
    this.results = null;
    const names = files.map((file) => file.name).join(", ");
    this.verdict = element("span", { className: "verdict" });
    this.message = element("span", { className: "hint" });
    this.score = element("td", { className: "sum" });
    this.goals = element("td", { className: "sum" });
    this.link = element("td");
    this.place = element(
      "tr",
      {},
      element("th", { scope: "row" }, name),
      element("td", { className: "file" }, names),
      element("td", {}, this.verdict, " ", this.message),
      this.score,
      this.goals,
      this.link,
    );
    this.show("");
  }

  /** Return the row of an evaluation, an entry of the server's list. */
  static restore(name, { evaluation_id: id, state, results, error }) {
    const row = new Row({ name, files: [] }, {});
    row.#begin(id);
    row.results = results;
    row.show(state, error?.message ?? "");
    return row;
  }

  /** Return what rows are sorted by: a text, or a number. */
  sortKey(by) {
    if (by === "name") return this.name;
    if (by === "verdict") return this.verdict.textContent;
    if (by === "goals") return Object.values(this.results?.goals ?? {}).filter(Boolean).length;
    return Number(this.results?.score?.score ?? -1);
  }

  #begin(id) {
    this.id = id;
    const name = element("code", {}, id.slice(0, 10));
    this.link.replaceChildren(element("a", { href: `#evaluation/${id}` }, name));
  }

  /** Whether it can be submitted, and is not evaluated yet. */
  get isOpen() {
    return this.wrong === "" && !this.isOver && (this.pairs.length > 0 || this.id !== null);
  }

  /** Whether it has a verdict. */
  get isOver() {
    return this.id !== null && ENDED.includes(this.state);
  }

  /** Whether it submits these same files. */
  submits({ pairs = [] }) {
    const isSame = ({ field, file }, n) =>
      field === this.pairs[n].field && file.content === this.pairs[n].file.content;
    return pairs.length > 0 && pairs.length === this.pairs.length && pairs.every(isSame);
  }

  /** Show a state, and why it takes longer or has gone wrong. */
  show(state, message = this.wrong) {
    this.state = state;
    const { words, tone } = verdictOf({ state, results: this.results });
    this.words = words;
    this.verdict.textContent = state === "" ? "" : say(words);
    this.verdict.dataset.tone = tone;
    this.message.textContent = message;
    this.score.textContent = scoreWords(this.results);
    this.goals.textContent = goalWords(this.results);
  }

  /**
   * Submit it, or run it again that has ended in the state `former`, and show its verdict as it
   * changes. A verdict stays where it is not run again. Throws nothing.
   */
  async evaluate(problem, token, signal, former = null) {
    const notice = (pause) =>
      this.show(this.state, pause ? say("waits {time}: {why}", pauseWords(pause)) : "");
    const client = new Client({ token, notice, parse });
    const { id, results } = this;
    try {
      this.results = null;
      if (former !== null) {
        this.show("sending");
        const options = { evaluator: "current", signal, tries: Infinity };
        this.#begin(await client.rerun(this.id, undefined, options));
      } else if (this.id === null) {
        this.show("sending");
        const form = new FormData();
        for (const { field, file } of this.pairs) {
          form.append(`submission[${field}]`, file.content, file.name);
        }
        form.append("metadata[student]", cutLabel(this.name));
        const options = { signal, tries: Infinity, key: this.key };
        this.#begin(await client.evaluateProblem(problem, form, options));
      }
      await this.#follow(client, signal);
    } catch (error) {
      const isGone = [404, 410].includes(error.status);
      if (former !== null && this.id === id && !(isGone && this.pairs.length > 0)) {
        this.results = results;
        const words = say("not evaluated again: {why}", { why: said(error) });
        return this.show(former, signal.aborted ? "" : words);
      }
      const isRefused = this.id === null && !signal.aborted;
      if (isRefused || isGone) this.#forget();
      this.show(signal.aborted ? "stopped" : "unknown", signal.aborted ? "" : said(error));
    }
  }

  /** Let the next try begin another evaluation. */
  #forget() {
    this.id = null;
    this.key = randomKey();
    this.link.replaceChildren();
  }

  async #follow(client, signal) {
    this.show("queued");
    const tally = new Tally();
    let drawn = 0;
    for (let after = ""; after !== null; ) {
      try {
        for await (const { data } of client.stream(this.id, { after, signal })) {
          for (const { type, payload } of data) if (type === "data") tally.add(payload);
          if (performance.now() - drawn < DRAW) continue;
          drawn = performance.now();
          this.results = tally.results;
          this.show("running");
        }
        after = null;
      } catch (error) {
        after = error.problem?.oldest; // another reader has acknowledged events
        if (after === undefined) throw error;
      }
    }
    const { state, results, error } = await client.status(this.id, { signal });
    this.results = results;
    this.show(state, error?.message ?? "");
  }

  /** Return its row of the CSV. */
  cells(problem, goals) {
    const { score, maximum } = this.results?.score ?? {};
    const verdict = this.isOver ? this.words : "";
    const message = this.message.textContent;
    return [
      ...[this.name, problem, verdict, numberOrNull(score), numberOrNull(maximum)],
      ...[this.state, message, this.id],
      ...goals.map((goal) => toBit(this.results?.goals ?? {}, goal)),
    ];
  }
}

function toBit(results, goal) {
  return Object.hasOwn(results, goal) ? Number(results[goal]) : null;
}

function numberOrNull(value) {
  return value === undefined || value === null ? null : Number(value);
}

/** Return a text as a label may have it: of so many bytes, without control characters. */
function cutLabel(text) {
  const bytes = new TextEncoder().encode(text.replace(/\p{Cc}/gu, " ").trim() || "unnamed");
  const cut = new TextDecoder().decode(bytes.subarray(0, LABEL));
  return cut.replace(/\ufffd+$/, "");
}

/** Return `name`, or with a number if it is taken. */
function makeName(name, names) {
  let free = name;
  for (let number = 2; names.has(free); number++) free = `${name} (${number})`;
  names.set(free, "");
  return free;
}

async function unzip(content, name, left) {
  try {
    return await readZip(content, left);
  } catch (error) {
    throw error instanceof BadZip ? new BadZip(`${name}: ${error.message}`) : error;
  }
}

/** Return the files that were dropped, those in folders with their paths, and empty folders. */
async function readDrop(transfer) {
  const entries = [...transfer.items].map((item) => item.webkitGetAsEntry()).filter(Boolean);
  const files = [];
  for (const [group, entry] of entries.entries()) await readEntry(entry, files, group);
  return files;
}

async function readEntry(entry, files, group) {
  if (files.length >= MOST_FILES) throw new BadZip(say("there are over {n} files", { n: MOST_FILES }));
  const path = entry.fullPath.replace(/^\//, "");
  if (cleanPath(path) === null) return; // hidden
  if (entry.isFile) {
    const content = await new Promise((resolve, reject) => entry.file(resolve, reject));
    files.push({ path, content, group });
    return;
  }
  const before = files.length;
  const reader = entry.createReader();
  for (;;) {
    const some = await new Promise((resolve, reject) => reader.readEntries(resolve, reject));
    if (some.length === 0) break;
    for (const each of some) await readEntry(each, files, group);
  }
  if (files.length === before) files.push({ path, content: null, group });
}
