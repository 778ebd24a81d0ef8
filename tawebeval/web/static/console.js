/** What an evaluator prints, as it comes, and no more of it than a page can bear. */

import { counted } from "./dom.js";

const BLOCK = 16_384; // characters of text in one node
const REDRAW = 50; // ms in which text is gathered before it is shown
const HALF = /[\uD800-\uDBFF]/; // the first half of a character in UTF-16

/**
 * Shows text in `output`, the newest `most` lines or characters. What is older goes, in whole
 * blocks, and `note` says how much. It follows the text unless its reader has scrolled up.
 */
export class Console {
  constructor(output, note, most = { lines: 10_000, characters: 1_000_000 }) {
    this.output = output;
    this.note = note;
    this.most = most;
    this.clear();
  }

  /** Show nothing, as before anything was written. */
  clear() {
    clearTimeout(this.timer);
    this.timer = undefined;
    this.output.replaceChildren();
    this.note.hidden = true;
    this.blocks = []; // { node, lines, size }, the oldest first
    this.lines = 0; // terminators, in the blocks
    this.size = 0; // characters, in the blocks
    this.dropped = 0; // lines
    this.missed = false; // whether some have never come
    this.waiting = [];
    this.waitingSize = 0;
  }

  /** Add some text, which may be a part of a line. */
  write(text) {
    this.waiting.push(text);
    this.waitingSize += text.length;
    // A page that nobody looks at has slow timers.
    if (this.waitingSize > this.most.characters) this.draw();
    else this.timer ??= setTimeout(() => this.draw(), REDRAW);
  }

  /** Say that the server has discarded something before it could be read. */
  miss() {
    this.missed = true;
    this.#tell();
  }

  /** Show all that was written. */
  draw() {
    clearTimeout(this.timer);
    this.timer = undefined;
    if (this.waiting.length === 0) return;
    const { output } = this;
    const follows = output.scrollHeight - output.scrollTop - output.clientHeight < 8;
    const text = this.waiting.join("");
    this.waiting = [];
    this.waitingSize = 0;
    for (let start = 0; start < text.length; ) {
      let end = Math.min(start + BLOCK, text.length);
      if (end < text.length && HALF.test(text[end - 1])) end -= 1; // characters stay whole
      this.#append(text.slice(start, end));
      start = end;
    }
    this.#drop();
    if (follows) output.scrollTop = output.scrollHeight;
  }

  #append(text) {
    const lines = text.split("\n").length - 1;
    let block = this.blocks.at(-1);
    if (block === undefined || block.size + text.length > BLOCK) {
      block = { node: new Text(), lines: 0, size: 0 };
      this.blocks.push(block);
      this.output.append(block.node);
    }
    block.node.appendData(text);
    block.lines += lines;
    block.size += text.length;
    this.lines += lines;
    this.size += text.length;
  }

  #drop() {
    while (this.lines > this.most.lines || this.size > this.most.characters) {
      const { node, lines, size } = this.blocks.shift();
      node.remove();
      this.lines -= lines;
      this.size -= size;
      this.dropped += lines;
    }
    this.#tell();
  }

  #tell() {
    const said = [];
    if (this.missed) said.push("The server has discarded a part of the output that was not read.");
    if (this.dropped > 0) {
      said.push(`${counted(this.dropped, "earlier line")} not shown.`);
    }
    this.note.hidden = said.length === 0;
    this.note.textContent = said.join(" ");
  }
}
