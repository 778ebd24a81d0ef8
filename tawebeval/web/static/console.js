/** What an evaluator prints, as it comes, and no more of it than a page can bear. */

import { StyledText } from "./ansi.js";
import { element } from "./dom.js";
import { say } from "./language.js";

const BLOCK = 16_384; // characters of text in one block
const MOST_STYLED = 5000; // runs of text with a style; beyond them text is plain
const REDRAW = 50; // ms in which text is gathered before it is shown
const HALF = /[\uD800-\uDBFF]/; // the first half of a character in UTF-16

/**
 * Shows text in `output`, the newest `most` lines or characters. What is older goes, in whole
 * blocks, and `note` says how much. It follows the text unless its reader has scrolled up or
 * `holds()`. `changed` is called with each element of which the text has changed.
 */
export class Console {
  constructor(
    output,
    note,
    { holds = () => false, changed = () => {}, most = { lines: 10_000, characters: 1_000_000 } },
  ) {
    Object.assign(this, { output, note, holds, changed, most });
    this.clear();
  }

  /** Show nothing, as before anything was written. */
  clear() {
    clearTimeout(this.timer);
    this.timer = undefined;
    this.output.replaceChildren();
    this.note.hidden = true;
    this.styled = new StyledText();
    this.blocks = []; // { node, lines, size, styled }, the oldest first
    this.lines = 0; // terminators, in the blocks
    this.size = 0; // characters, in the blocks
    this.styledRuns = 0; // in the blocks
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
    const runs = this.styled.take(this.waiting.join(""));
    this.waiting = [];
    this.waitingSize = 0;
    const changed = new Set();
    for (const { text, style } of runs) {
      for (let start = 0; start < text.length; ) {
        let end = Math.min(start + BLOCK, text.length);
        if (end < text.length && HALF.test(text[end - 1])) end -= 1; // characters stay whole
        changed.add(this.#append(text.slice(start, end), style));
        start = end;
      }
    }
    this.#drop();
    for (const node of changed) if (node.isConnected) this.changed(node);
    if (follows && !this.holds()) output.scrollTop = output.scrollHeight;
  }

  /** Append text to a block, and return the block's element. */
  #append(text, style) {
    const lines = text.split("\n").length - 1;
    let block = this.blocks.at(-1);
    if (block === undefined || block.size + text.length > BLOCK) {
      block = { node: element("span"), lines: 0, size: 0, styled: 0 };
      this.blocks.push(block);
      this.output.append(block.node);
    }
    if (style && this.styledRuns < MOST_STYLED) {
      block.node.append(element("span", { className: style }, text));
      block.styled += 1;
      this.styledRuns += 1;
    } else if (block.node.lastChild instanceof Text) block.node.lastChild.appendData(text);
    else block.node.append(text);
    block.lines += lines;
    block.size += text.length;
    this.lines += lines;
    this.size += text.length;
    return block.node;
  }

  #drop() {
    while (this.lines > this.most.lines || this.size > this.most.characters) {
      const { node, lines, size, styled } = this.blocks.shift();
      node.remove();
      this.lines -= lines;
      this.size -= size;
      this.styledRuns -= styled;
      this.dropped += lines;
    }
    this.#tell();
  }

  #tell() {
    const said = [];
    if (this.missed) {
      said.push(say("The server has discarded a part of the output that was not read."));
    }
    if (this.dropped > 0) said.push(say("{n} earlier lines not shown.", { n: this.dropped }));
    this.note.hidden = said.length === 0;
    this.note.textContent = said.join(" ");
  }
}
