/** What an evaluator sends as data: goals and scores, files, and whatever else it likes. */

import { Cases } from "./cases.js";
import { byId, bytes, element } from "./dom.js";
import { say } from "./language.js";
import { countPixels } from "./pictures.js";
import { brief, isBrief, tree } from "./values.js";
import { isCase, isProgress, isScore } from "./verdict.js";

const MOST_VALUES = 500;
const MOST_FILES = 50;
const MOST_GOALS = 500;
const LONGEST_NAME = 100; // characters
const LONGEST_PREVIEW = 8192; // bytes
const LARGEST_PICTURE = 512 * 1024; // characters of base64
const MOST_PIXELS = 32_000_000; // of all pictures: 128 MB
const PROGRESS = ["type", "done", "total"];
const SCORE = ["type", "score", "maximum", "goal", "name"];
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
  /** `link` is called with an element whose text may name places in the source. */
  constructor(link) {
    this.goals = byId("goals");
    this.files = byId("files");
    this.data = byId("data");
    this.cases = new Cases(link);
    this.urls = [];
    this.clear();
  }

  /** Show nothing, as before anything came. */
  clear() {
    this.urls.forEach(URL.revokeObjectURL);
    this.urls = [];
    this.pixels = []; // of the pictures among the files, 0 for others
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

  /** Take the payload of a data event, any value of JSON. */
  add(payload) {
    try {
      this.#add(payload);
    } catch {
      this.#append("data", element("li", {}, say("This value cannot be shown.")), MOST_VALUES);
    }
  }

  #add(payload) {
    const type = payload?.type;
    if (isCase(payload)) {
      if (!this.cases.add(payload)) this.#addData(payload);
    } else if (isSummarized(payload)) return;
    else if (type === "goal_result" && "goal" in payload) this.#addGoal("goal", payload);
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
    if (!hasPlace(said) || (typeof goal !== "string" && !isBrief(goal))) this.#addData(payload);
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
      resultCell.textContent = say(result ? "reached" : "not reached");
      resultCell.className = result ? "result good" : "result bad";
    } else if (result !== undefined) {
      resultCell.textContent = brief(result);
    }
    if (score !== undefined) {
      const words = most === undefined ? "{score}" : "{score} of {maximum}";
      scoreCell.textContent = say(words, { score: brief(score), maximum: brief(most ?? "") });
      this.goals.querySelector("table").classList.add("scored");
    }
    this.goals.hidden = false;
  }

  #addFile(payload) {
    const { filename, content_type: type, content_base64: base64 } = payload;
    const content = typeof filename === "string" && typeof type === "string" && decode(base64);
    if (!content) return this.#addData(payload);
    const name = safeName(filename);
    // Not by its own type: a stranger's page that is opened from here would be one of ours.
    const blob = new Blob([content], { type: "application/octet-stream" });
    const url = URL.createObjectURL(blob);
    this.urls.push(url);
    const kind = type.slice(0, LONGEST_NAME);
    const about = element("span", { className: "hint" }, `${kind}, ${bytes(content.length)}`);
    const link = element("a", { href: url, download: name }, name);
    const item = element("li", {}, element("p", {}, link, " ", about));
    const text = readText(content);
    const isPicture = PICTURES.includes(type);
    const pixels = isPicture ? this.#findRoom(content, type, base64) : null;
    this.pixels.push(pixels ?? 0);
    if (isPicture && pixels === null) about.append(`, ${say("not shown")}`);
    if (pixels !== null) {
      const alt = say("Picture {name}", { name });
      item.append(element("img", { src: `data:${type};base64,${base64}`, alt }));
    } else if (text) {
      const words = element("pre", { tabIndex: 0 }, text);
      words.setAttribute("aria-label", say("Beginning of {name}", { name }));
      words.setAttribute("role", "region");
      item.append(element("details", {}, element("summary", {}, say("Preview")), words));
    }
    this.#append("files", item, MOST_FILES, () => {
      URL.revokeObjectURL(this.urls.shift());
      this.pixels.shift();
    });
  }

  /** Return the pixels of a picture that can be shown beside the others; else null. */
  #findRoom(content, type, base64) {
    const pixels = base64.length < LARGEST_PICTURE ? countPixels(content, type) : null;
    if (pixels === null) return null;
    const sum = this.pixels.reduce((one, other) => one + other, pixels);
    return sum <= MOST_PIXELS ? pixels : null;
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
    const words = {
      files: "The first {n} files are no longer shown.",
      data: "The first {n} values are no longer shown.",
    };
    note.textContent = say(words[which], { n: this.forgotten[which] });
    if (which === "data") entries.start = this.forgotten[which] + 1;
  }
}

/** Return the bytes of base64, null for anything else. */
function decode(base64) {
  try {
    return Uint8Array.from(atob(base64), (character) => character.charCodeAt(0));
  } catch {
    return null;
  }
}

/** Return the beginning of a file if that is text in UTF-8, else null. */
export function readText(content) {
  try {
    const beginning = content.subarray(0, LONGEST_PREVIEW);
    const text = new TextDecoder("utf-8", { fatal: true }).decode(beginning, { stream: true });
    const isCut = beginning.length < content.length;
    return text.includes("\0") ? null : text + (isCut ? "…" : "");
  } catch {
    return null;
  }
}

/** Whether what is above all tables says as much as a value does. */
function isSummarized(value) {
  const known = isProgress(value) ? PROGRESS : isScore(value) ? SCORE : [];
  return known.length > 0 && Object.keys(value).every((name) => known.includes(name));
}

/** Whether a row of the table says as much as these members, of a goal or a score, do. */
function hasPlace({ result, score, maximum, max_score: most = maximum, ...others }) {
  if (Object.keys(others).length > 0 || (most !== undefined && score === undefined)) return false;
  return [result, score, most].every((value) => value === undefined || isBrief(value));
}
