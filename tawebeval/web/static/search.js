/** A search in text that is still growing. */

import { formatNumber, say } from "./language.js";

const MOST = 1000; // matches
const LATER = 200; // ms in which changes of the text are gathered
const SPECIAL = /[\\^$.*+?()[\]{}|/]/g;
const HIGHLIGHTS = globalThis.CSS?.highlights; // without it the match is selected

/**
 * Marks what `input` says in the text of `place`, and says how much there is in `count`. `next` and
 * `previous` are buttons.
 */
export class Search {
  constructor(place, { input, count, next, previous }) {
    Object.assign(this, { place, input, count });
    input.addEventListener("input", () => this.#begin());
    input.addEventListener("keydown", (event) => {
      if (event.key === "Enter") {
        event.preventDefault();
        this.#go(event.shiftKey ? -1 : 1);
      } else if (event.key === "Escape") this.clear();
    });
    next.addEventListener("click", () => this.#go(1));
    previous.addEventListener("click", () => this.#go(-1));
    this.clear();
  }

  /** Whether something is searched for. */
  get isActive() {
    return this.input.value !== "";
  }

  /** Search for nothing. */
  clear() {
    this.input.value = "";
    this.#begin();
  }

  /** Take notice of a change of the text. */
  refresh() {
    if (!this.isActive) return;
    this.isStale = true;
    this.timer ??= setTimeout(() => this.#renew(), LATER);
  }

  #begin() {
    this.#find();
    this.current = this.matches.length > 0 ? 0 : -1;
    this.#show();
    if (this.current >= 0) this.#reveal();
  }

  #go(step) {
    if (this.isStale) this.#renew();
    const { length } = this.matches;
    if (length === 0) return;
    this.current = (this.current + step + length) % length;
    this.#show();
    this.#reveal();
  }

  /** Search again, and stay at the match that was looked at, or at the next one after it. */
  #renew() {
    const old = this.matches[this.current];
    this.#find();
    const isBefore = (match) => match.compareBoundaryPoints(Range.START_TO_START, old) < 0;
    const passed = old === undefined ? 0 : this.matches.filter(isBefore).length;
    this.current = Math.min(passed, this.matches.length - 1);
    this.#show();
  }

  #find() {
    clearTimeout(this.timer);
    this.timer = undefined;
    this.isStale = false;
    this.isCut = false;
    this.matches = [];
    const wanted = this.input.value;
    if (wanted === "") return;
    const walker = document.createTreeWalker(this.place, NodeFilter.SHOW_TEXT);
    const nodes = [];
    let text = "";
    while (walker.nextNode()) {
      nodes.push({ node: walker.currentNode, start: text.length });
      text += walker.currentNode.data;
    }
    let n = 0;
    const pointAt = (offset) => {
      while (n + 1 < nodes.length && nodes[n + 1].start <= offset) n += 1;
      return [nodes[n].node, offset - nodes[n].start];
    };
    for (const { 0: found, index } of text.matchAll(pattern(wanted))) {
      this.isCut = this.matches.length === MOST;
      if (this.isCut) break;
      const range = new Range();
      range.setStart(...pointAt(index));
      const [last, offset] = pointAt(index + found.length - 1);
      range.setEnd(last, offset + 1);
      this.matches.push(range);
    }
  }

  #show() {
    const { matches, current } = this;
    const total = `${formatNumber(matches.length)}${this.isCut ? "+" : ""}`;
    const words = matches.length ? "{done} of {total}" : "No match";
    this.count.textContent = this.isActive ? say(words, { done: current + 1, total }) : "";
    if (!HIGHLIGHTS) return;
    HIGHLIGHTS.set("found", new Highlight(...matches));
    HIGHLIGHTS.set("current", new Highlight(...matches.slice(current, current + 1)));
  }

  #reveal() {
    const match = this.matches[this.current];
    const { place } = this;
    const shift = match.getBoundingClientRect().top - place.getBoundingClientRect().top;
    place.scrollTop += shift - place.clientHeight / 2;
    if (HIGHLIGHTS) return;
    const { startContainer, startOffset, endContainer, endOffset } = match;
    getSelection().setBaseAndExtent(startContainer, startOffset, endContainer, endOffset);
  }
}

/** Return the pattern of a text in any case of its letters. */
function pattern(text) {
  return new RegExp(text.replace(SPECIAL, "\\$&"), "giu");
}
