/** The problems of the server: the list to choose from, and the statement of one. */

import { Client } from "./client.js";
import { byId, bytes, duration, element, said, shortTime } from "./dom.js";
import { say } from "./language.js";
import { memory } from "./memory.js";
import { hasFormula, renderStatement } from "./statement.js";
import { verdictOf } from "./verdict.js";

const SEARCHED = 8; // problems from which on a search is of use
const LIMITS = {
  wall_clock: ["time {amount}", duration],
  cpu: ["processor time {amount}", duration],
  memory: ["memory {amount}", (size) => bytes(size).replace(/[.,]0 /, " ")],
};

/** The list of problems. */
export class ProblemList {
  constructor() {
    this.search = byId("problem-search");
    this.search.addEventListener("input", () => this.#draw());
  }

  /** Show these problems, entries of the server's list. */
  offer(problems) {
    this.problems = problems;
    this.search.closest(".field").hidden = problems.length < SEARCHED;
    this.search.value = "";
    this.solved = new Map(); // for each problem that was tried, whether it is solved
    this.#draw();
  }

  /** Mark the problems of these evaluations, an asynchronous iterable of entries of a list. */
  async mark(evaluations) {
    const solved = new Map();
    for await (const { problem, state, results, counts } of evaluations) {
      if (problem === null || !counts) continue;
      const isSolved = verdictOf({ state, results }).tone === "good";
      solved.set(problem, isSolved || solved.get(problem) === true);
    }
    this.solved = solved;
    this.#draw();
  }

  /** Say that a problem is not among them. */
  complain(name) {
    byId("problem-hint").textContent = say("This server has no problem {name}.", { name });
  }

  #draw() {
    const wanted = this.search.value.trim().toLowerCase();
    const found = this.problems.filter(({ name, title }) =>
      `${title} ${name}`.toLowerCase().includes(wanted),
    );
    const entries = found.map((problem) => makeEntry(problem, this.solved.get(problem.name)));
    byId("problem-list").replaceChildren(...entries);
    const all = this.problems.length;
    const hint = say("{found} of {n} problems", { found: found.length, n: all });
    byId("problem-hint").textContent = found.length === all ? "" : hint;
  }
}

/** Return when a problem opens, if it is to, or else when it closes; empty for always. */
export function timeWords({ opens, closes, late }, now = Date.now()) {
  if (opens && Date.parse(opens) > now) return say("opens {time}", { time: shortTime(opens) });
  if (!closes) return "";
  const time = shortTime(closes);
  if (Date.parse(closes) > now) return say("closes {time}", { time });
  return say(late ? "closed {time} and still takes late submissions" : "closed {time}", { time });
}

/**
 * Return when a problem may take submissions that does not now, in ms: Infinity for never again;
 * null while it takes them.
 */
export function nextOpening({ opens, closes, late }, now) {
  if (opens && Date.parse(opens) > now) return Date.parse(opens);
  return closes && !late && Date.parse(closes) <= now ? Infinity : null;
}

function makeEntry({ name, title, description, ...times }, isSolved) {
  const link = element("a", { href: `#problem/${name}` }, title || name);
  const words = description ? [element("p", { className: "hint" }, description)] : [];
  const time = timeWords(times);
  if (time) words.push(element("p", { className: "hint" }, time));
  if (isSolved !== undefined) {
    const className = isSolved ? "good" : "partly";
    words.push(element("p", { className: `mark ${className}` }, say(isSolved ? "solved" : "tried")));
  }
  return element("li", {}, link, ...words);
}

/** The statement of one problem. */
export class StatementView {
  constructor() {
    this.section = byId("statement");
    this.shown = null;
  }

  /** Show the problem of this list entry; ask for its statement with `token`. */
  async open({ name, title, limits, ...times }, token) {
    if (this.shown === name) return;
    this.close();
    this.shown = name;
    this.section.hidden = false;
    byId("statement-title").textContent = title || name;
    const held = Object.entries(LIMITS).filter(([limit]) => limits[limit] > 0);
    const words = held.map(([limit, [what, format]]) => say(what, { amount: format(limits[limit]) }));
    const all = say("Limits of one evaluation, all cases together: {limits}.", {
      limits: words.join(", "),
    });
    const time = timeWords(times);
    const when = time ? say("The problem {time}.", { time }) : "";
    const facts = [words.length > 0 ? all : "", when].join(" ").trim();
    byId("statement-limits").textContent = facts;
    byId("statement-limits").hidden = facts === "";
    const { signal } = (this.stopping = new AbortController());
    byId("statement-hint").textContent = say("Loading the statement …");
    try {
      const [{ parseMarkdown }, { statement, pictures }] = await Promise.all([
        import("./vendor-markdown.js"),
        new Client({ token }).problem(name, { language: memory.get("language"), signal }),
      ]);
      const tokens = parseMarkdown(statement);
      const { renderFormula } = hasFormula(tokens) ? await import("./vendor-formula.js") : {};
      if (signal.aborted) return;
      const nodes = renderStatement(tokens, title || name, {
        makeFormula: renderFormula,
        pictures,
      });
      byId("statement-text").replaceChildren(...nodes);
      byId("statement-hint").textContent = statement ? "" : say("This problem has no statement here.");
    } catch (error) {
      if (signal.aborted) return;
      byId("statement-hint").textContent = said(error);
      this.shown = null; // to be asked for again, such as when the problem has opened
    }
  }

  /** Show no statement, nor one that is still to arrive. */
  close() {
    this.stopping?.abort();
    this.shown = null;
    this.section.hidden = true;
    byId("statement-text").replaceChildren();
  }
}
