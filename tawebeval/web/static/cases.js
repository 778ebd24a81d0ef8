/** The test cases of an evaluation: a table, of which a part is drawn, and plots of all of them. */

import { diffLines, markDifference, visible } from "./diff.js";
import { byId, bytes, element, setOptions } from "./dom.js";
import { formatNumber, say } from "./language.js";
import { drawColumns, makeColumns } from "./plot.js";
import { brief, isBrief, numberOf } from "./values.js";
import { TONES, verdictWords } from "./verdict.js";

const WINDOW = 200; // rows
const MOST_CASES = 20_000; // that are kept
const SLACK = 1000; // cases that are dropped at once
const MOST_TEXT = 4_000_000; // characters of all texts that are kept
const LONGEST_NAME = 200; // characters
const LONGEST_MESSAGE = 2000;
const LONGEST_OUTPUT = 8000;
const BRIEF = 160; // characters of a message in its row
const REDRAW = 50; // ms in which cases are gathered before they are shown
const COLUMNS = ["points", "time", "memory"]; // which are hidden while they are empty
const LENGTHS = {
  message: LONGEST_MESSAGE,
  input: LONGEST_OUTPUT,
  expected: LONGEST_OUTPUT,
  printed: LONGEST_OUTPUT,
};
const PLOTS = { time: { member: "seconds", words: inSeconds }, memory: { member: "size", words: bytes } };
const SIGNS = { same: "", changed: "≠", missing: "−", extra: "+" };

/**
 * The table shows the newest cases, until its reader opens a row, chooses a verdict or asks for
 * earlier ones. `link` is called with an element whose text may name places in the source.
 */
export class Cases {
  constructor(link) {
    this.link = link;
    this.section = byId("cases");
    this.note = this.section.querySelector(".hint");
    this.place = this.section.querySelector(".scroll");
    this.table = this.section.querySelector("table");
    this.filter = byId("cases-filter");
    this.filter.addEventListener("change", () => this.#choose());
    byId("cases-earlier").addEventListener("click", () => this.#turn(-WINDOW));
    byId("cases-later").addEventListener("click", () => this.#turn(WINDOW));
    this.clear();
  }

  /** Show nothing, as before anything came. */
  clear() {
    clearTimeout(this.timer);
    this.timer = undefined;
    this.kept = []; // the oldest first
    this.chosen = this.kept; // those that pass the filter
    this.rows = []; // that are drawn, of `chosen` from `start` on
    this.start = 0;
    this.follows = true;
    this.count = 0;
    this.stripped = 0; // cases without their texts, from the first that is kept
    this.textSize = 0;
    this.verdicts = new Set();
    this.filter.replaceChildren();
    this.#offerVerdicts();
    this.section.hidden = true;
    this.note.hidden = true;
    this.table.classList.remove(...COLUMNS);
    this.table.tBodies[0].replaceChildren();
  }

  /** Add a case; return whether the table shows all of it. */
  add(payload) {
    const { isWhole, ...shown } = describe(payload);
    shown.number = ++this.count;
    this.kept.push(shown);
    if (this.chosen !== this.kept && this.#passes(shown)) this.chosen.push(shown);
    this.textSize += shown.textSize;
    this.verdicts.add(shown.verdict);
    if (this.kept.length > MOST_CASES + SLACK) this.#drop(SLACK);
    while (this.textSize > MOST_TEXT) this.#strip(this.kept[this.stripped++]);
    this.timer ??= setTimeout(() => this.draw(), REDRAW);
    return isWhole;
  }

  /** Show all that was added. */
  draw() {
    clearTimeout(this.timer);
    this.timer = undefined;
    if (this.count === 0) return;
    const { place, chosen } = this;
    const isAtEnd = place.scrollHeight - place.scrollTop - place.clientHeight < 8;
    const follows = this.follows && isAtEnd && !place.contains(document.activeElement);
    this.#offerVerdicts();
    this.#drawRows(follows ? chosen.length - WINDOW : this.start);
    this.#drawPlots();
    this.section.hidden = false;
    if (follows) place.scrollTop = place.scrollHeight;
  }

  /** Draw rows from the case `start` on, and keep those that are there. */
  #drawRows(start) {
    start = Math.max(0, Math.min(start, this.chosen.length - 1));
    const common = start - this.start;
    const isContinued = common >= 0 && common <= this.rows.length;
    for (const { row, more } of this.rows.splice(0, isContinued ? common : Infinity)) {
      row.remove();
      more?.remove();
    }
    this.start = start;
    const made = this.chosen.slice(start + this.rows.length, start + WINDOW).map((each) => ({
      each,
      row: makeRow(each, (button) => this.#toggle(each, button)),
    }));
    this.rows.push(...made);
    this.table.tBodies[0].append(...made.map(({ row }) => row));
    for (const name of COLUMNS) {
      if (made.some(({ each }) => each[name])) this.table.classList.add(name);
    }
    this.#tell();
  }

  #tell() {
    const { start, rows, chosen, kept } = this;
    const [first, last] = [start + Math.min(1, rows.length), start + rows.length];
    const shown = { first, last, n: chosen.length };
    byId("cases-pages").hidden = chosen.length <= WINDOW;
    byId("cases-shown").textContent = say("{first}–{last} of {n} cases", shown);
    byId("cases-earlier").ariaDisabled = start === 0 ? "true" : null;
    byId("cases-later").ariaDisabled = last >= chosen.length ? "true" : null;
    const dropped = this.count - kept.length;
    this.note.hidden = dropped === 0;
    this.note.textContent = say("The first {n} cases are no longer kept.", { n: dropped });
  }

  #turn(by) {
    const start = Math.max(0, this.start + by);
    if (start >= this.chosen.length || start === this.start) return;
    this.#drawRows(start);
    this.follows = start + WINDOW >= this.chosen.length;
    this.place.scrollTop = 0;
  }

  /** Show the cases that pass the filter. */
  #choose() {
    const isAll = this.filter.value === "";
    this.chosen = isAll ? this.kept : this.kept.filter((each) => this.#passes(each));
    this.follows = isAll;
    this.#clearRows();
    this.#drawRows(0);
    this.place.scrollTop = 0;
  }

  #passes({ verdict }) {
    const { value } = this.filter;
    return value === "" || value === verdict || (value === "others" && verdict !== "accepted");
  }

  #offerVerdicts() {
    if (this.filter.length === this.verdicts.size + 2) return;
    const verdicts = [...this.verdicts].map((each) => [each, say(verdictWords(each))]);
    setOptions(this.filter, [["", say("all")], ["others", say("not accepted")], ...verdicts]);
  }

  #clearRows() {
    this.rows = [];
    this.table.tBodies[0].replaceChildren();
  }

  #drop(number) {
    const dropped = this.kept.splice(0, number);
    for (const each of dropped.slice(this.stripped)) this.textSize -= each.textSize;
    this.stripped = Math.max(0, this.stripped - number);
    let gone = number;
    if (this.chosen !== this.kept) {
      gone = dropped.filter((each) => this.#passes(each)).length;
      this.chosen.splice(0, gone);
    }
    this.start -= gone;
    if (this.start >= 0) return;
    this.start = 0;
    this.#clearRows();
  }

  /** Forget the texts of a case. */
  #strip(each) {
    this.textSize -= each.textSize;
    each.textSize = 0;
    for (const name of Object.keys(LENGTHS)) delete each[name];
  }

  #drawPlots() {
    for (const [name, { member, words }] of Object.entries(PLOTS)) {
      const figure = byId(`${name}-plot`);
      const columns = makeColumns(this.kept, member);
      const most = Math.max(...columns.map(({ value }) => value));
      figure.hidden = !(most > 0) || columns.length < 2;
      if (figure.hidden) continue;
      const caption = name === "time" ? "Time, at most {most}" : "Memory, at most {most}";
      figure.querySelector("figcaption").textContent = say(caption, { most: words(most) });
      drawColumns(figure.querySelector("svg"), columns, words);
    }
  }

  /** Open the details of a case below its row, or close them. */
  #toggle(each, button) {
    this.follows = false;
    const entry = this.rows.find((one) => one.each === each);
    button.ariaExpanded = entry.more ? "false" : "true";
    if (entry.more) {
      entry.more.remove();
      entry.more = undefined;
      return;
    }
    const cell = element("td", { colSpan: COLUMNS.length + 2 }, ...makeDetails(each));
    entry.more = element("tr", { className: "more" }, cell);
    entry.row.after(entry.more);
    this.link(cell);
  }
}

/** Return the texts and numbers of a row, short copies: a value may have megabytes. */
function describe({ type, case: name, verdict, ...members }) {
  const shown = { name: name.slice(0, LONGEST_NAME), verdict, tone: TONES[verdict], textSize: 0 };
  let isWhole = name.length <= LONGEST_NAME;
  for (const [key, value] of Object.entries(members)) {
    if (value === null) continue;
    if (Object.hasOwn(LENGTHS, key) && typeof value === "string") {
      shown[key] = value.slice(0, LENGTHS[key]);
      shown.textSize += shown[key].length;
      isWhole &&= value.length <= LENGTHS[key];
    } else if (key === "points" && isBrief(value)) shown.points = brief(value);
    else if (key === "time" && numberOf(value) >= 0) {
      shown.seconds = numberOf(value);
      shown.time = inSeconds(shown.seconds);
    } else if (key === "memory" && numberOf(value) >= 0) {
      shown.size = numberOf(value);
      shown.memory = bytes(shown.size);
    } else isWhole = false;
  }
  return { ...shown, isWhole };
}

function inSeconds(seconds) {
  return say("{count} s", { count: formatNumber(seconds, 3) });
}

function makeRow({ name, verdict, tone, message = "", input, expected, printed, ...cells }, toggle) {
  const head = element("th", { scope: "row" });
  const isLong = message.length > BRIEF || message.includes("\n");
  if (isLong || [input, expected, printed].some((text) => text !== undefined)) {
    const button = element("button", { type: "button", className: "open" }, name);
    button.ariaExpanded = "false";
    button.addEventListener("click", () => toggle(button));
    head.append(button);
  } else head.append(name);
  const [line] = message.split("\n", 1);
  const short = line.length > BRIEF ? `${line.slice(0, BRIEF)}…` : line;
  if (short) head.append(element("p", { className: "hint" }, short));
  const result = element("td", { className: "result" });
  result.append(element("span", { className: tone }, say(verdictWords(verdict))));
  const others = COLUMNS.map((key) => element("td", { className: key }, cells[key] ?? ""));
  return element("tr", {}, head, result, ...others);
}

/** Return the elements that show the texts of a case, with the difference marked. */
function makeDetails({ message, input, expected, printed }) {
  const made = [];
  if (message) made.push(element("pre", {}, message));
  const hasBoth = expected !== undefined && printed !== undefined;
  const texts = hasBoth ? { Input: input } : { Input: input, Expected: expected, Printed: printed };
  for (const [label, text] of Object.entries(texts)) {
    if (text !== undefined) made.push(element("p", {}, say(label)), element("pre", {}, text));
  }
  if (hasBoth) {
    const { rows, cut } = diffLines(expected, printed);
    const heads = ["Expected", "", "Printed"].map((text) =>
      element(text ? "th" : "td", text ? { scope: "col" } : {}, text && say(text)),
    );
    const table = element("table", { className: "diff" });
    table.append(element("thead", {}, element("tr", {}, ...heads)));
    table.append(element("tbody", {}, ...rows.map(makeDiffRow)));
    made.push(table);
    if (cut) made.push(element("p", { className: "hint" }, say("Long texts are cut.")));
  }
  if (made.length === 0) made.push(say("The texts of this case are no longer kept."));
  return made;
}

function makeDiffRow({ kind, expected, printed }) {
  const [left, right] =
    kind === "changed"
      ? markDifference(expected, printed).map(([before, different, after]) => [
          before,
          element("mark", {}, different),
          after,
        ])
      : [expected, printed].map((line) => [line === null ? "" : visible(line)]);
  return element(
    "tr",
    { className: kind },
    element("td", {}, ...left),
    element("td", { className: "sign" }, SIGNS[kind]),
    element("td", {}, ...right),
  );
}
