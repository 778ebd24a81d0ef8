/** What an evaluator sends as data: goals and scores, files, and whatever else it likes. */

import { Cases } from "./cases.js";
import { byId, bytes, counted, element } from "./dom.js";
import { brief, isBrief, tree } from "./values.js";
import { isCase, isProgress } from "./verdict.js";

const MOST_VALUES = 500;
const MOST_FILES = 50;
const MOST_GOALS = 500;
const LONGEST_NAME = 100; // characters
const LARGEST_PICTURE = 512 * 1024; // characters of base64
const PICTURES = ["image/png", "image/jpeg", "image/gif", "image/webp", "image/svg+xml"];

/** Return a name for a file that was chosen by a stranger, safe to be saved under. */
export function safeName(name) {
  const cleaned = String(name)
    .replace(/.*[/\\]/s, "")
    .replace(/[\p{Cc}\p{Cf}\p{Zl}\p{Zp}<>:"|?*]/gu, "") // none that is unseen or means something
    .replace(/^[.\s]+|[.\s]+$/g, "");
  return [...cleaned].slice(-LONGEST_NAME).join("") || "file";
}

/** The tables and lists below the console. */
export class Results {
  constructor() {
    this.goals = byId("goals");
    this.files = byId("files");
    this.data = byId("data");
    this.cases = new Cases();
    this.urls = [];
    this.clear();
  }

  /** Show nothing, as before anything came. */
  clear() {
    this.urls.forEach(URL.revokeObjectURL);
    this.urls = [];
    this.rows = new Map(); // of goals, by their names
    this.cases.clear();
    this.goals.querySelector("table").classList.remove("scored");
    for (const section of [this.goals, this.files, this.data]) {
      section.hidden = true;
      section.querySelector("tbody, ul, ol").replaceChildren();
      const note = section.querySelector(".hint");
      if (note) note.hidden = true;
    }
    this.forgotten = { files: 0, data: 0 };
  }

  /** Take the payload of a data event. */
  add(payload) {
    const type = payload?.type;
    if (isCase(payload)) {
      if (!this.cases.add(payload)) this.#addData(payload);
    } else if (isProgress(payload)) {
      if (Object.keys(payload).length > 3) this.#addData(payload);
    } else if (type === "goal_result" && "goal" in payload) this.#addGoal("goal", payload);
    else if (type === "score" && "score" in payload) {
      this.#addGoal(payload.goal == null ? "name" : "goal", payload);
    } else if (type === "file" && typeof payload.content_base64 === "string") {
      this.#addFile(payload);
    } else this.#addData(payload);
  }

  /** Take a goal or a score, named by one member; what has no place in the table is data. */
  #addGoal(member, payload) {
    const { type, [member]: goal = type, ...said } = payload;
    const { result, score, maximum, max_score: most = maximum } = said;
    const name = typeof goal === "string" ? goal : brief(goal);
    if (!hasPlace(said) || name !== String(goal)) this.#addData(payload);
    let row = this.rows.get(name);
    if (row === undefined) {
      if (this.rows.size >= MOST_GOALS) return this.#addData(payload);
      const cells = ["result", "score"].map((which) => element("td", { className: which }));
      row = element("tr", {}, element("th", { scope: "row" }, name), ...cells);
      this.rows.set(name, row);
      this.goals.querySelector("tbody").append(row);
    }
    const [, resultCell, scoreCell] = row.cells;
    if (typeof result === "boolean") {
      resultCell.textContent = result ? "reached" : "not reached";
      resultCell.className = result ? "result good" : "result bad";
    } else if (result !== undefined) {
      resultCell.textContent = brief(result);
    }
    if (score !== undefined) {
      scoreCell.textContent = brief(score) + (most === undefined ? "" : ` of ${brief(most)}`);
      this.goals.querySelector("table").classList.add("scored");
    }
    this.goals.hidden = false;
  }

  #addFile(payload) {
    const { filename, content_type: type, content_base64: base64 } = payload;
    const name = safeName(filename);
    let content;
    try {
      content = Uint8Array.from(atob(base64), (character) => character.charCodeAt(0));
    } catch {
      return this.#addData(payload);
    }
    // Not by its own type: a stranger's page that is opened from here would be one of ours.
    const blob = new Blob([content], { type: "application/octet-stream" });
    const url = URL.createObjectURL(blob);
    this.urls.push(url);
    const about = element("span", { className: "hint" }, `${type}, ${bytes(content.length)}`);
    const link = element("a", { href: url, download: name }, name);
    const item = element("li", {}, element("p", {}, link, " ", about));
    if (PICTURES.includes(type) && base64.length < LARGEST_PICTURE) {
      item.append(element("img", { src: `data:${type};base64,${base64}`, alt: `Picture ${name}` }));
    }
    this.#append("files", item, MOST_FILES, () => URL.revokeObjectURL(this.urls.shift()));
  }

  #addData(payload) {
    this.#append("data", element("li", {}, tree(payload)), MOST_VALUES);
  }

  /** Append to a list of which only the newest stay. */
  #append(which, item, most, forget = () => {}) {
    const section = this[which];
    const entries = section.querySelector("ul, ol");
    entries.append(item);
    section.hidden = false;
    if (entries.childElementCount <= most) return;
    entries.firstElementChild.remove();
    forget();
    this.forgotten[which] += 1;
    const note = section.querySelector(".hint");
    note.hidden = false;
    const thing = which === "files" ? "file" : "value";
    note.textContent = `The first ${counted(this.forgotten[which], thing)} are no longer shown.`;
    if (which === "data") entries.start = this.forgotten[which] + 1;
  }
}

/** Whether a row of the table says as much as these members, of a goal or a score, do. */
function hasPlace({ result, score, maximum, max_score: most = maximum, ...others }) {
  if (Object.keys(others).length > 0 || (most !== undefined && score === undefined)) return false;
  return [result, score, most].every((value) => value === undefined || isBrief(value));
}
