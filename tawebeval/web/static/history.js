/** What this browser has submitted, for tokens that may not list evaluations, and file names. */

import { formatAge, say } from "./language.js";

const MOST = 100; // evaluations
const LONGEST_COMMAND = 60; // characters

/** Return `entries`, `[{ id, file }]`, with a new one first. */
export function addEntry(entries, entry) {
  const others = readEntries(entries).filter(({ id }) => id !== entry.id);
  return [entry, ...others].slice(0, MOST);
}

/** Return what is kept, without what is not of this form. */
export function readEntries(kept) {
  if (!Array.isArray(kept)) return [];
  return kept.filter((each) => typeof each?.id === "string" && /^[a-z0-9-]{40,57}$/.test(each.id));
}

/** Return the names of the files that a form submits, in a few words. */
export function nameFiles(form) {
  const names = [...form.entries()]
    .filter(([name]) => name.startsWith("submission["))
    .map(([name, value]) => (typeof value === "string" ? `${name.slice(11, -1)}.txt` : value.name));
  const [first = "", ...others] = names;
  return others.length === 0 ? first : say("{first} and {n} more", { first, n: others.length });
}

/** Return what an evaluation is of: a problem by its title, or an evaluator's place or command. */
export function nameSubject({ problem, directory, evaluator_cmd: command }, titles) {
  if (problem) return titles.get(problem) || problem;
  return directory || shorten(command || "") || say("Evaluation");
}

function shorten(text) {
  return text.length > LONGEST_COMMAND ? `${text.slice(0, LONGEST_COMMAND)}…` : text;
}

/** Return how long ago a time was, in words. */
export function ageWords(time, now = Date.now()) {
  const seconds = Math.max(0, (now - Date.parse(time)) / 1000);
  for (const [unit, size] of [
    ["day", 86_400],
    ["hour", 3600],
    ["minute", 60],
  ]) {
    const count = Math.floor(seconds / size);
    if (count > 0) return formatAge(count, unit);
  }
  return say("just now");
}
