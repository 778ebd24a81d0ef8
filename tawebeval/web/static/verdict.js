/** One verdict for an evaluation, its score and a summary in words, from its results. */

import { say } from "./language.js";
import { numberOf } from "./values.js";

const MOST_GOALS = 100; // which the daemon counts, too
const LIVE = ["queued", "fetching", "running"];
const FIRST = ["judge_error", "compile_error"]; // which say more than any other verdict

/** Verdicts of a case (docs/evaluators.md), and how each is shown. */
export const TONES = {
  accepted: "good",
  wrong_answer: "bad",
  time_limit: "bad",
  memory_limit: "bad",
  output_limit: "bad",
  runtime_error: "bad",
  compile_error: "bad",
  partial: "partly",
  skipped: "partly",
  judge_error: "bad",
};

/** Whether an evaluation in this state goes on. */
export function isLive(state) {
  return LIVE.includes(state);
}

/** Whether a data value is a case. */
export function isCase(payload) {
  const { type, case: name, verdict } = payload ?? {};
  return (
    type === "case" &&
    typeof name === "string" &&
    typeof verdict === "string" &&
    Object.hasOwn(TONES, verdict)
  );
}

/** Return a verdict of a case in words, in English as all verdicts here. */
export function verdictWords(verdict) {
  return verdict.replaceAll("_", " ");
}

/**
 * Return the verdict of an evaluation: `words`, and a `tone`, which is "good", "bad", "partly",
 * "live" or "plain". `state` and `results` are members of its status.
 */
export function verdictOf({ state, results }) {
  if (state === "failed") return { words: "Evaluation failed", tone: "bad" };
  if (state === "cancelled") return { words: "Cancelled", tone: "plain" };
  if (state === "finished") {
    return judge(results) ?? { words: "Finished", tone: "plain" };
  }
  const failing = findFailing(results?.cases ?? {});
  if (isLive(state) && failing !== undefined) {
    return { words: `${capitalize(verdictWords(failing))} so far`, tone: "bad" };
  }
  return { words: capitalize(state), tone: isLive(state) ? "live" : "plain" };
}

/** Return the verdict of all results; null if they say nothing of it. */
function judge(results) {
  if (!results) return null;
  const { cases, goals, goals_omitted: omitted, score } = results;
  const found = Object.keys(cases).filter((verdict) => Number(cases[verdict]) > 0);
  const reached = Object.values(goals);
  const share = score?.maximum > 0 ? score.score / score.maximum : null;
  const failing = findFailing(cases);
  const isPart = share > 0 && share < 1;
  if (failing !== undefined && (!isPart || FIRST.includes(failing))) {
    return { words: capitalize(verdictWords(failing)), tone: "bad" };
  }
  const isMixed = reached.includes(true) && reached.includes(false);
  if (isPart || isMixed || found.includes("partial")) {
    return { words: "Partly correct", tone: "partly" };
  }
  if (reached.includes(false) || (share !== null && share <= 0)) {
    return { words: "Not accepted", tone: "bad" };
  }
  if (omitted > 0 || found.includes("skipped")) return { words: "Incomplete", tone: "partly" };
  const isAccepted = found.length > 0 || reached.length > 0 || share !== null;
  return isAccepted ? { words: "Accepted", tone: "good" } : null;
}

/** Return the verdict that counts of those that are not good: the first that came, mostly. */
function findFailing(cases) {
  const failing = Object.keys(cases).filter((verdict) => TONES[verdict] === "bad");
  return FIRST.find((verdict) => failing.includes(verdict)) ?? failing[0];
}

/** Return the score of `results` in words, "30 of 100"; empty without a score. */
export function scoreWords(results) {
  const score = results?.score;
  if (!score) return "";
  const n = round(score.score);
  if (score.maximum === null) return say("{n} points", { n });
  return say("{score} of {maximum}", { score: n, maximum: round(score.maximum) });
}

/** Return how many goals are reached in words, "2 of 3"; empty without goals. */
export function goalWords(results) {
  const reached = Object.values(results?.goals ?? {});
  if (reached.length === 0) return "";
  return say("{done} of {total}", { done: reached.filter(Boolean).length, total: reached.length });
}

function round(number) {
  return Number(Number(number).toFixed(4));
}

/** Return the `results` of a status in a few words each, the most telling first. */
export function summarize(results) {
  if (!results) return [];
  const { score, goals, goals_omitted: omitted, cases } = results;
  const said = score ? [say("score {score}", { score: scoreWords(results) })] : [];
  const reached = Object.values(goals);
  if (reached.length > 0) {
    const words = omitted > 0 ? "{done} of over {n} goals reached" : "{done} of {n} goals reached";
    said.push(say(words, { done: reached.filter(Boolean).length, n: reached.length }));
  }
  const { accepted = 0, ...others } = cases;
  const counts = Object.entries(others).map(([name, count]) => [verdictWords(name), Number(count)]);
  const total = counts.reduce((sum, [, count]) => sum + count, Number(accepted));
  if (total > 0) {
    const rest = counts.map(([words, count]) => say("{count} {verdict}", { count, verdict: say(words) }));
    const why = rest.length > 0 ? ` (${rest.join(", ")})` : "";
    const values = { done: Number(accepted), n: total };
    said.push(say("{done} of {n} cases accepted", values) + why);
  }
  return said;
}

/** Sums up the results in events as they come, as the daemon does for the status. */
export class Tally {
  constructor() {
    this.goals = new Map();
    this.results = null;
  }

  /** Take the payload of a data event; return whether it is a result. */
  add(payload) {
    const { type, goal, result } = payload ?? {};
    if (isCase(payload)) {
      const { cases } = this.#begin();
      cases[payload.verdict] = (cases[payload.verdict] ?? 0) + 1;
    } else if (type === "goal_result" && typeof goal === "string" && typeof result === "boolean") {
      this.#addGoal(goal, result);
    } else if (isProgress(payload)) {
      this.#begin().progress = { done: numberOf(payload.done), total: numberOf(payload.total) };
    } else if (isScore(payload)) {
      const { score, maximum = null } = payload;
      this.#begin().score = {
        score: numberOf(score),
        maximum: maximum === null ? null : numberOf(maximum),
      };
    } else return false;
    return true;
  }

  #begin() {
    this.results ??= { goals: {}, goals_omitted: 0, cases: {}, progress: null, score: null };
    return this.results;
  }

  #addGoal(goal, result) {
    const results = this.#begin();
    if (this.goals.size < MOST_GOALS || this.goals.has(goal)) this.goals.set(goal, result);
    else results.goals_omitted += 1;
    results.goals = Object.fromEntries(this.goals);
  }
}

/** Whether a data value says how far the evaluator is. */
export function isProgress(payload) {
  const isCount = (value) => Number.isSafeInteger(numberOf(value)) && numberOf(value) >= 0;
  return payload?.type === "progress" && isCount(payload.done) && isCount(payload.total);
}

/** Whether a data value is the score of the whole submission. */
export function isScore(payload) {
  const { type, score, maximum = null, goal = null, name = null } = payload ?? {};
  const isNumber = (value) => Number.isFinite(numberOf(value));
  const isWhole = goal === null && name === null;
  return type === "score" && isWhole && isNumber(score) && (maximum === null || isNumber(maximum));
}

function capitalize(words) {
  return words.charAt(0).toUpperCase() + words.slice(1);
}
