/** The submitted files with their lines, and links to lines that messages name. */

import { announce, byId, bytes, element } from "./dom.js";
import { colourLines } from "./editor.js";
import { say } from "./language.js";
import { findMarks, findPlaces, placePattern } from "./places.js";

const MOST_FILES = 50;
const MOST_LINES = 3000; // of a file that are shown
const LONGEST_LINE = 2000; // characters
const MOST_COLOURED = 128 * 1024; // characters of a file
const MOST_LINKS = 200; // to lines, for one evaluation
const MOST_MARKS = 50; // in an editor

/** The section of the page that shows what was submitted. */
export class Source {
  constructor() {
    this.section = byId("source");
    this.clear();
  }

  /** Show nothing, as before anything was known. */
  clear() {
    this.files = new Map(); // those with text, by their names
    this.pattern = null;
    this.links = 0;
    this.marked = null;
    this.section.hidden = true;
    this.section.querySelector("ul").replaceChildren();
  }

  /** Show files as the server tells of them. */
  show(files) {
    const shown = files.slice(0, MOST_FILES);
    const items = shown.map((file, n) => {
      const branch = element("details");
      const about = element("span", { className: "hint" }, `${file.field}, ${bytes(file.size)}`);
      branch.append(element("summary", {}, file.filename, " ", about));
      branch.addEventListener("toggle", () => this.#fill(file, branch));
      branch.open = n === 0 && file.text !== undefined;
      if (file.text !== undefined && !this.files.has(file.filename)) {
        this.files.set(file.filename, { file, branch });
      }
      return element("li", {}, branch);
    });
    this.section.querySelector("ul").replaceChildren(...items);
    this.section.hidden = items.length === 0;
    this.pattern = placePattern([...this.files.keys()]);
  }

  #fill({ filename, text }, branch) {
    if (branch.childElementCount > 1) return;
    if (text === undefined) {
      branch.append(element("p", { className: "hint" }, say("The content cannot be shown.")));
      return;
    }
    const lines = text.split("\n");
    if (lines.at(-1) === "") lines.pop();
    const rows = lines.slice(0, MOST_LINES).map((line) => {
      const shown = line.length > LONGEST_LINE ? `${line.slice(0, LONGEST_LINE)}…` : line;
      return element("li", { tabIndex: -1 }, shown || "\n");
    });
    const list = element("ol", { className: "lines", tabIndex: 0 }, ...rows);
    list.setAttribute("aria-label", filename);
    branch.append(list);
    if (text.length <= MOST_COLOURED) colour(filename, text, rows);
    const left = lines.length - rows.length;
    const more = say("{n} more lines.", { n: left });
    if (left > 0) branch.append(element("p", { className: "hint" }, more));
  }

  /**
   * Make links of places in the text of an element. If the text `grows`, a place that it ends in
   * may not be whole.
   */
  link(root, grows = false) {
    if (this.pattern === null) return;
    const walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
    const texts = [];
    while (walker.nextNode()) {
      if (!walker.currentNode.parentElement.closest("a")) texts.push(walker.currentNode);
    }
    for (const text of texts) {
      const places = findPlaces(text.data, this.pattern, MOST_LINKS - this.links);
      for (const place of places.reverse()) {
        if (grows && place.end === text.length) continue;
        const named = text.splitText(place.start);
        named.splitText(place.end - place.start);
        const link = element("a", { href: location.hash }, named.data);
        link.addEventListener("click", (event) => {
          event.preventDefault();
          this.#reveal(place);
        });
        named.replaceWith(link);
        this.links += 1;
      }
    }
  }

  /** Return the marks of a compiler's message for an editor, with the `text` of each one's file. */
  findMarks(message) {
    return findMarks(message, this.pattern, MOST_MARKS).map((mark) => ({
      ...mark,
      text: this.files.get(mark.name).file.text,
    }));
  }

  #reveal({ name, line }) {
    const { file, branch } = this.files.get(name);
    branch.open = true;
    this.#fill(file, branch);
    const row = branch.querySelector("ol").children[line - 1];
    if (row === undefined) return announce(say("{name} has no line {line} here.", { name, line }));
    this.marked?.classList.remove("marked");
    this.marked = row;
    row.classList.add("marked");
    row.focus({ preventScroll: true });
    row.scrollIntoView({ block: "center" });
  }
}

/** Colour the rows of a program, when the editor's library is loaded. */
async function colour(name, text, rows) {
  const lines = (await colourLines(name, text)) ?? [];
  for (const [n, row] of rows.entries()) {
    const pieces = lines[n] ?? [];
    // A row that was cut, or is empty, stays as it is.
    if (pieces.map(([piece]) => piece).join("") !== row.textContent) continue;
    row.replaceChildren(
      ...pieces.map(([piece, className]) =>
        className === "" ? piece : element("span", { className }, piece),
      ),
    );
  }
}
