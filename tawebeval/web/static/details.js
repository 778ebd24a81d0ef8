/** What was asked for, with which limits, where it ran, and how long each state took. */

import { bytes, duration, element } from "./dom.js";
import { formatTime, say } from "./language.js";
import { svgElement } from "./plot.js";

const MEMBERS = {
  problem: "Problem",
  repository: "Repository",
  commit_oid: "Commit",
  tree_oid: "Tree",
  directory: "Directory",
  evaluator_cmd: "Command",
  environment: "Environment",
  runner: "Node",
  seed: "Seed",
  metadata: "Labels",
  limits: "Limits",
  created: "Accepted at",
};
const SECONDS = ["wall_clock", "cpu"];
const SIZES = ["memory", "file_size", "disk", "output", "stderr"];
const PHASES = { created: "Waiting", fetching: "Fetching and waiting", running: "Running" };

/** Return the terms and descriptions of a status for a `dl`. */
export function makeDetails(status) {
  return Object.entries(MEMBERS).flatMap(([name, words]) => {
    const texts = describe(name, status[name]).map((text) => element("dd", {}, text));
    return texts.length > 0 ? [element("dt", {}, say(words)), ...texts] : [];
  });
}

/** Return a member of the status in words, one text for each label or limit. */
function describe(name, value) {
  if (value === null || value === undefined || value === "") return [];
  if (name === "created") return [formatTime(value)];
  if (name === "environment") return [value.name, value.digest].filter(Boolean);
  if (name === "metadata") return Object.entries(value).map((pair) => pair.join(" = "));
  if (name === "runner") return runnerFacts(value);
  if (name !== "limits") return [String(value)];
  return Object.entries(value).map(([limit, most]) => {
    if (SIZES.includes(limit)) return `${limit} = ${bytes(Number(most))}`;
    return `${limit} = ${most}${SECONDS.includes(limit) ? " s" : ""}`;
  });
}

function runnerFacts({ kind, job, node, queue_reason: reason }) {
  const facts = [node ?? say("not chosen yet")];
  facts.push(job ? `${kind} ${job}` : say("{kind}: not started yet", { kind }));
  return reason ? [...facts, say("waits: {why}", { why: reason })] : facts;
}

/** Return what an evaluation has used, in words. */
export function usageFacts({ wall_seconds: wall, cpu_seconds: cpu, peak_memory_bytes: memory }) {
  const facts = [];
  if (wall !== null) facts.push(say("ran {time}", { time: duration(wall) }));
  if (cpu !== null) facts.push(say("CPU {time}", { time: duration(cpu) }));
  if (memory !== null) facts.push(say("memory {size}", { size: bytes(memory) }));
  return facts;
}

/** Return the phases of a status that are known, each with its `words`, and `from` and `to` in s. */
export function findPhases(status) {
  const times = [...Object.keys(PHASES), "ended"]
    .filter((name) => typeof status[name] === "string")
    .map((name) => [name, Date.parse(status[name])]);
  const begin = times[0]?.[1];
  return times.slice(0, -1).map(([name, from], n) => ({
    words: PHASES[name],
    from: (from - begin) / 1000,
    to: Math.max(from, times[n + 1][1]) / 1000 - begin / 1000,
  }));
}

/** Return a timeline of an evaluation: a bar of its phases, and a list of them. */
export function makeTimeline(status) {
  const phases = findPhases(status);
  if (phases.length === 0) return [];
  const whole = phases.at(-1).to || 1;
  const bar = svgElement("svg", {
    class: "timeline",
    viewBox: "0 0 1000 12",
    preserveAspectRatio: "none",
    "aria-hidden": "true",
  });
  const items = phases.map(({ words, from, to }, n) => {
    const width = Math.max(3, (1000 * (to - from)) / whole);
    const x = Math.min(997, (1000 * from) / whole);
    bar.append(svgElement("rect", { class: `phase-${n}`, x, y: 0, width, height: 12 }));
    return element("li", { className: `phase-${n}` }, `${say(words)} ${duration(to - from)}`);
  });
  return [bar, element("ol", { className: "phases" }, ...items)];
}
