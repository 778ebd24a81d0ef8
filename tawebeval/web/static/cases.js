/** The test cases of an evaluation, the newest ones in a table. */

import { byId, bytes, counted, element } from "./dom.js";
import { brief, isBrief } from "./values.js";
import { TONES, verdictWords } from "./verdict.js";

const MOST_CASES = 500; // rows
const LONGEST = 2000; // characters of a text that are shown
const REDRAW = 50; // ms in which cases are gathered before they are shown
const COLUMNS = ["points", "time", "memory"]; // which are hidden while they are empty
const TEXTS = ["message", "expected", "printed"];

/** The table. It follows the newest case unless its reader has scrolled up. */
export class Cases {
  constructor() {
    this.section = byId("cases");
    this.note = this.section.querySelector(".hint");
    this.place = this.section.querySelector(".scroll");
    this.table = this.section.querySelector("table");
    this.clear();
  }

  /** Show nothing, as before anything came. */
  clear() {
    clearTimeout(this.timer);
    this.timer = undefined;
    this.waiting = [];
    this.dropped = 0; // cases
    this.section.hidden = true;
    this.note.hidden = true;
    this.table.classList.remove(...COLUMNS);
    this.table.tBodies[0].replaceChildren();
  }

  /** Add a case; return whether the table shows all of it. */
  add(payload) {
    const shown = describe(payload);
    this.waiting.push(shown);
    // They may come faster than rows are made.
    if (this.waiting.length >= 2 * MOST_CASES) this.#drop(this.waiting.splice(0, MOST_CASES));
    this.timer ??= setTimeout(() => this.draw(), REDRAW);
    return shown.isWhole;
  }

  /** Show all that was added. */
  draw() {
    clearTimeout(this.timer);
    this.timer = undefined;
    if (this.waiting.length === 0) return;
    const { place, note, table } = this;
    const follows = place.scrollHeight - place.scrollTop - place.clientHeight < 8;
    const [body] = table.tBodies;
    const shown = this.waiting.splice(-MOST_CASES);
    const over = Math.max(0, body.rows.length + shown.length - MOST_CASES);
    const old = [...body.rows].slice(0, over);
    for (const row of old) row.remove();
    this.#drop([...old, ...this.waiting.splice(0)]);
    body.append(...shown.map(makeRow));
    for (const name of COLUMNS) {
      if (shown.some((each) => each[name])) table.classList.add(name);
    }
    note.hidden = this.dropped === 0;
    note.textContent = `The first ${counted(this.dropped, "case")} are no longer shown.`;
    this.section.hidden = false;
    if (follows) place.scrollTop = place.scrollHeight;
  }

  #drop({ length }) {
    this.dropped += length;
  }
}

/** Return the texts of a row, short copies: a value may have megabytes. */
function describe({ type, case: name, verdict, ...members }) {
  const shown = { name: name.slice(0, LONGEST), verdict };
  let isWhole = name.length <= LONGEST;
  for (const [key, value] of Object.entries(members)) {
    if (value === null) continue;
    if (TEXTS.includes(key) && typeof value === "string") {
      shown[key] = value.slice(0, LONGEST);
      isWhole &&= value.length <= LONGEST;
    } else if (key === "points" && isBrief(value)) shown.points = brief(value);
    else if (key === "time" && isAmount(value)) shown.time = `${Number(value).toFixed(3)} s`;
    else if (key === "memory" && isAmount(value)) shown.memory = bytes(Number(value));
    else isWhole = false;
  }
  return { ...shown, isWhole };
}

function isAmount(value) {
  return ["number", "object"].includes(typeof value) && isBrief(value) && Number(value) >= 0;
}

function makeRow({ name, verdict, message, expected, printed, ...cells }) {
  const head = element("th", { scope: "row" }, name);
  if (message) head.append(element("p", { className: "hint" }, message));
  for (const [label, text] of Object.entries({ expected, printed })) {
    if (text === undefined) continue;
    const words = element("pre", { tabIndex: 0 }, text);
    head.append(element("details", {}, element("summary", {}, label), words));
  }
  const result = element("td", { className: "result" });
  result.append(element("span", { className: TONES[verdict] }, verdictWords(verdict)));
  const others = COLUMNS.map((key) => element("td", { className: key }, cells[key] ?? ""));
  return element("tr", {}, head, result, ...others);
}
