/** The table of a group: what each member has reached in each problem, live, and its CSV. */

import { Client, isPassing } from "./client.js";
import { saveCsv } from "./csv.js";
import { announce, byId, element, said, setOptions } from "./dom.js";
import { ageWords } from "./history.js";
import { say } from "./language.js";
import { isLive, scoreWords, verdictOf } from "./verdict.js";

const ASK_AGAIN = 4000; // ms between two looks, at least
const SHARE = 10; // and so many times as long as a look takes
const AT_ONCE = 4; // evaluations that are run again
const POLL = 2000; // ms

/** A table that keeps itself up to date while it is open. */
export class Standings {
  /** `unauthorized` is called when the server wants another token. */
  constructor(unauthorized) {
    this.unauthorized = unauthorized;
    this.members = [];
    this.problems = [];
    this.found = new Map(); // standings by member and problem
    this.cells = new Map(); // the same
    byId("standings-problem").addEventListener("change", () => this.#arrange());
    byId("standings-csv").addEventListener("click", () => this.#save());
    byId("standings-rerun").addEventListener("click", () => this.#rerun());
    byId("standings-stop").addEventListener("click", () => this.rerunning?.abort());
  }

  /** Offer the members of the groups that the token supervises, and these problems. */
  offer({ problems, me }) {
    this.close();
    this.rerunning?.abort();
    this.members = [...new Set(Object.values(me.supervises).flat())].sort();
    this.problems = problems;
    this.found.clear();
    byId("standings").hidden = this.members.length === 0;
    setOptions(byId("standings-problem"), [
      ["", say("all")],
      ...problems.map(({ name, title }) => [name, title || name]),
    ]);
    this.#arrange();
  }

  /** Begin to show what there is, with `token`. */
  open(token) {
    this.close();
    if (this.rerunning === undefined) byId("standings-hint").textContent = "";
    this.token = token;
    this.stopping = new AbortController();
    if (this.members.length > 0) this.#refresh(this.stopping.signal);
  }

  /** Ask for nothing any more; what is run again goes on. */
  close() {
    this.stopping?.abort();
  }

  async #refresh(signal) {
    const hint = byId("standings-hint");
    let failure = "";
    while (!signal.aborted) {
      const begun = performance.now();
      let wanted = 0; // ms of pause, by the server
      try {
        if (!document.hidden) await this.#update(signal);
        if (failure !== "" && hint.textContent === failure) hint.textContent = "";
        failure = "";
      } catch (error) {
        if (signal.aborted) return;
        failure = said(error);
        // What the rerun says stays.
        if (this.rerunning === undefined) hint.textContent = failure;
        if (error.status === 401) this.unauthorized();
        // 400: the daemon has lost its store, and the list begins again.
        if (!isPassing(error) && error.status !== 400) return;
        wanted = 1000 * (error.retryAfter ?? 0);
      }
      const pause = Math.max(ASK_AGAIN, wanted, SHARE * (performance.now() - begun));
      await new Promise((resolve) => setTimeout(resolve, pause));
    }
  }

  async #update(signal) {
    const found = new Map();
    const client = new Client({ token: this.token });
    for await (const one of client.standings({ signal, tries: 3 })) found.set(keyOf(one), one);
    signal.throwIfAborted(); // or another token's table would be filled
    this.found = found;
    for (const [key, cell] of this.cells) cell.fill(found.get(key));
  }

  get #shown() {
    const wanted = byId("standings-problem").value;
    return this.problems.filter(({ name }) => wanted === "" || wanted === name);
  }

  /** Make the table anew. */
  #arrange() {
    const shown = this.#shown;
    const heads = shown.map(({ name, title }) => element("th", { scope: "col" }, title || name));
    byId("standings-head").replaceChildren(element("th", { scope: "col" }, say("Student")), ...heads);
    this.cells = new Map();
    const rows = this.members.map((caller) => {
      const cells = shown.map((problem) => {
        const cell = new Cell(problem);
        const key = keyOf({ caller, problem: problem.name });
        this.cells.set(key, cell);
        cell.fill(this.found.get(key));
        return cell.place;
      });
      return element("tr", {}, element("th", { scope: "row" }, caller), ...cells);
    });
    byId("standings-rows").replaceChildren(...rows);
    this.#showButtons();
  }

  #showButtons() {
    const isBusy = this.rerunning !== undefined;
    const chosen = this.problems.find(({ name }) => name === byId("standings-problem").value);
    const words = chosen
      ? "Evaluate all submissions for {problem} again"
      : "Evaluate all submissions again …";
    byId("standings-rerun").textContent = say(words, { problem: chosen?.title || chosen?.name });
    byId("standings-rerun").hidden = isBusy;
    byId("standings-stop").hidden = !isBusy;
    byId("standings-problem").disabled = isBusy;
  }

  /** Run the last evaluation of each submission for the problem again, as the problem is now. */
  async #rerun() {
    const problem = byId("standings-problem").value;
    const hint = byId("standings-hint");
    if (problem === "") {
      hint.textContent = say("Choose the problem whose submissions are to be evaluated again.");
      return byId("standings-problem").focus();
    }
    const { signal } = (this.rerunning = new AbortController());
    const client = new Client({ token: this.token });
    let [done, failed, reason] = [0, 0, ""];
    this.#showButtons();
    byId("standings-stop").focus();
    hint.textContent = say("Reading the list …");
    try {
      const newest = new Map();
      for await (const entry of client.evaluations({ problem, signal })) {
        if (!entry.counts || !this.members.includes(entry.caller)) continue;
        const { evaluation_id: id, state } = entry; // not the results of thousands
        newest.set(`${entry.caller} ${entry.submitted}`, { id, state });
      }
      const waiting = [...newest.values()].filter(({ state }) => !isLive(state));
      const n = waiting.length;
      const work = async () => {
        while (waiting.length > 0 && !signal.aborted) {
          const { id } = waiting.shift();
          // Someone has to ask for an evaluation until it ends, or the server gives it up.
          await runAgain(client, id, signal).catch((error) => {
            if (signal.aborted) return;
            failed += 1;
            reason = said(error);
          });
          done += 1;
          hint.textContent = say("{done} of {n} submissions evaluated again; keep this page open.", {
            done,
            n,
          });
        }
      };
      await Promise.all(Array.from({ length: AT_ONCE }, work));
      const words = [say("{n} submissions evaluated again.", { n })];
      if (failed > 0) words.push(say("{n} could not be: {why}", { n: failed, why: reason }));
      hint.textContent = signal.aborted ? say("Stopped.") : words.join(" ");
    } catch (error) {
      hint.textContent = signal.aborted ? say("Stopped.") : said(error);
    }
    this.rerunning = undefined;
    const isFocused = document.activeElement === byId("standings-stop");
    this.#showButtons();
    announce(hint.textContent);
    if (isFocused) byId("standings-rerun").focus(); // not from where the teacher is meanwhile
  }

  #save() {
    const shown = this.#shown;
    const standings = this.members.flatMap((caller) =>
      shown.map((problem) => {
        const found = this.found.get(keyOf({ caller, problem: problem.name }));
        return { ...found, problem, caller };
      }),
    );
    const goals = new Set(standings.flatMap(({ best }) => Object.keys(best?.results?.goals ?? {})));
    const head = ["student", "problem", "verdict", "score", "maximum", "submissions", "last"];
    const rows = standings.map(({ problem: { name, closes }, caller, best, ...one }) => {
      const { score = null, maximum = null } = best?.results?.score ?? {};
      const reached = best?.results?.goals ?? {};
      return [
        ...[caller, name, best ? verdictOf(best).words : "", score, maximum],
        ...[one.submissions ?? 0, one.last_submitted ?? ""],
        isLate(best, closes) ? "late" : "",
        best?.evaluation_id ?? "",
        ...[...goals].map((goal) => {
          if (!Object.hasOwn(reached, goal)) return "";
          return reached[goal] ? "yes" : "no";
        }),
      ];
    });
    const name = `${byId("standings-problem").value || "standings"}.csv`;
    saveCsv(name, [[...head, "late", "evaluation", ...goals], ...rows]);
  }
}

/** One cell: the best verdict and score, which lead to the evaluation, and the tries. */
class Cell {
  constructor({ closes }) {
    this.closes = closes;
    this.link = element("a");
    this.score = element("span", { className: "sum" });
    this.hint = element("p", { className: "hint" });
    this.place = element("td", {}, this.link, " ", this.score, this.hint);
  }

  /** Show a standing; undefined for none. */
  fill(standing) {
    this.link.hidden = standing === undefined;
    if (standing === undefined) return this.#say("", "");
    const { best, submissions, evaluated, last_submitted: last } = standing;
    const { words, tone } = verdictOf(best);
    this.link.href = `#evaluation/${best.evaluation_id}`;
    this.link.className = "verdict";
    this.link.dataset.tone = tone;
    if (this.link.textContent !== say(words)) this.link.textContent = say(words);
    const facts = [say("{n} tries", { n: submissions }), ageWords(last)];
    const running = submissions - evaluated;
    if (running > 0) facts.splice(1, 0, say("{n} running", { n: running }));
    if (isLate(best, this.closes)) facts.unshift(say("late"));
    this.#say(scoreWords(best.results), facts.join(", "));
  }

  #say(score, hint) {
    if (this.score.textContent !== score) this.score.textContent = score;
    if (this.hint.textContent !== hint) this.hint.textContent = hint;
  }
}

/** Run an evaluation again with the problem as it is now; return when it has ended. */
async function runAgain(client, former, signal) {
  const options = { evaluator: "current", signal, tries: Infinity };
  const id = await client.rerun(former, undefined, options);
  for (;;) {
    const { state } = await client.status(id, { signal });
    if (!isLive(state)) return;
    await new Promise((resolve) => setTimeout(resolve, POLL));
  }
}

function isLate(best, closes) {
  return Boolean(best && closes) && Date.parse(best.submitted) >= Date.parse(closes);
}

function keyOf({ caller, problem }) {
  return `${caller} ${problem}`;
}
