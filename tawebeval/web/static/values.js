/** Values of JSON: read without loss, and shown as trees. */

import { element } from "./dom.js";
import { say } from "./language.js";

const SHOWN = 100; // members that are shown at once
const LONG = 2000; // characters of a string that are shown
const BRIEF = 24; // characters of one in a preview

/** A number of which JavaScript would change the digits. */
class ExactNumber {
  constructor(source) {
    this.source = source;
  }

  toString() {
    return this.source;
  }
}

/** Read JSON; numbers stay as they were written, where the browser can tell how that was. */
export function parse(json) {
  // Most events are text, and there may be very many.
  return json.startsWith('{"type":"text"') ? JSON.parse(json) : JSON.parse(json, keepDigits);
}

function keepDigits(_, value, context) {
  const source = context?.source;
  if (typeof value !== "number" || source === undefined || String(value) === source) return value;
  return new ExactNumber(source);
}

/** Return a number of JSON as a Number; NaN for anything else. */
export function numberOf(value) {
  if (value instanceof ExactNumber) return Number(value.source);
  return typeof value === "number" ? value : NaN;
}

/** Return an element that shows a value; what is inside of it can be opened and closed. */
export function tree(value, name, open = true) {
  const label = name === undefined ? [] : [element("span", { className: "key" }, `${name}: `)];
  if (!isBranch(value)) {
    return element("div", { className: "leaf" }, ...label, leaf(value));
  }
  const members = Object.entries(value);
  const words = Array.isArray(value) ? "{n} items" : "{n} members";
  const size = element("span", { className: "size" }, say(words, { n: members.length }));
  if (members.length === 0) {
    return element("div", { className: "leaf" }, ...label, size);
  }
  const branch = element("details", { className: "branch" });
  branch.append(element("summary", {}, ...label, size, preview(value)));
  const fill = () => {
    if (branch.childElementCount === 1) branch.append(list(members));
  };
  branch.addEventListener("toggle", fill); // made when it is wanted: values may be large
  if (open) {
    fill();
    branch.open = true;
  }
  return branch;
}

function list(members) {
  const rows = element("ul");
  let shown = 0;
  const more = element("button", { type: "button", className: "small" });
  const show = () => {
    const next = members.slice(shown, shown + SHOWN);
    shown += next.length;
    const made = next.map(([key, member]) => element("li", {}, tree(member, key, false)));
    rows.append(...made);
    const left = members.length - shown;
    more.textContent = say("Show more of {left}", { left });
    if (left === 0) more.remove();
    return made[0];
  };
  more.addEventListener("click", () => {
    const first = show();
    if (!more.isConnected) first.querySelector("summary")?.focus();
  });
  show();
  return members.length > shown ? element("div", {}, rows, more) : rows;
}

/** Return a value in a word or so. */
export function brief(value) {
  if (Array.isArray(value)) return "[…]";
  if (isBranch(value)) return "{…}";
  const text = String(value);
  return text.length > BRIEF ? `${text.slice(0, BRIEF)}…` : text;
}

/** Whether `brief` says all of a value. */
export function isBrief(value) {
  return !isBranch(value) && String(value).length <= BRIEF;
}

/** Return a few words of what is inside, for a branch that is closed. */
function preview(value) {
  const members = Object.values(value);
  const words = members.slice(0, 4).map(brief);
  if (members.length > 4) words.push("…");
  return element("span", { className: "preview" }, words.join(", "));
}

function isBranch(value) {
  return value !== null && typeof value === "object" && !(value instanceof ExactNumber);
}

function leaf(value) {
  if (typeof value === "string") {
    const left = value.length - LONG;
    const more = left > 0 ? ` ${say("(and {n} more characters)", { n: left })}` : "";
    return element("span", { className: "string" }, value.slice(0, LONG) + more);
  }
  const kind = value === null ? "null" : value instanceof ExactNumber ? "number" : typeof value;
  return element("span", { className: kind }, String(value));
}
