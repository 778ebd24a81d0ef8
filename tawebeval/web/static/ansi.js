/**
 * Text with escape sequences of terminals (ECMA-48). Only SGR counts, which chooses colours and
 * weights; all other sequences are dropped.
 */

const LONGEST = 1000; // characters of a sequence; what is longer is text
const SEQUENCE =
  /\x1b(?:\[([0-?]*)[ -/]*([@-~])|[\]PX^_][^\x07\x1b\n]*(?:\x07|\x1b\\|(?=\n))|[ -/]*[0-OQ-WYZ\\`-~])/g;
const BEGUN = /\x1b(?:\[[0-?]*[ -/]*|[\]PX^_][^\x07\x1b\n]*\x1b?|[ -/]*)$/;
const WEIGHTS = { 1: "bold", 2: "faint", 3: "italic", 4: "underline", 7: "inverse", 9: "struck" };
const ENDS = { 22: ["bold", "faint"], 23: ["italic"], 24: ["underline"], 27: ["inverse"], 29: ["struck"] };

/** Splits text into runs of one style; sequences may be cut anywhere. */
export class StyledText {
  constructor() {
    this.rest = "";
    this.weights = new Set();
    this.colours = { fg: null, bg: null }; // 0 to 15
  }

  /** Return runs `{ text, style }`; a style is names of classes, empty for plain text. */
  take(piece) {
    const text = this.rest + piece;
    const begun = text.slice(-LONGEST).match(BEGUN)?.[0] ?? "";
    this.rest = begun;
    const whole = begun === "" ? text : text.slice(0, -begun.length);
    if (!whole.includes("\x1b")) return this.#run(whole);
    const runs = [];
    let start = 0;
    for (const { 0: sequence, 1: parameters, 2: final, index } of whole.matchAll(SEQUENCE)) {
      runs.push(...this.#run(whole.slice(start, index)));
      start = index + sequence.length;
      if (final === "m") this.#style(parameters);
    }
    runs.push(...this.#run(whole.slice(start)));
    return runs;
  }

  #run(text) {
    const { fg, bg } = this.colours;
    const names = [...this.weights];
    if (fg !== null) names.push(`fg-${fg}`);
    if (bg !== null) names.push(`bg-${bg}`);
    const shown = text.replaceAll("\x1b", "");
    return shown === "" ? [] : [{ text: shown, style: names.join(" ") }];
  }

  /** Take the parameters of SGR. */
  #style(parameters) {
    const codes = parameters.replaceAll(":", ";").split(";").map(Number);
    for (let n = 0; n < codes.length; n++) {
      const code = codes[n];
      if (code === 0) {
        this.weights.clear();
        this.colours = { fg: null, bg: null };
      } else if (code in WEIGHTS) this.weights.add(WEIGHTS[code]);
      else if (code in ENDS) ENDS[code].forEach((name) => this.weights.delete(name));
      else if (code === 38 || code === 48) {
        const [colour, used] = readColour(codes.slice(n + 1, n + 5));
        this.colours[code === 38 ? "fg" : "bg"] = colour;
        n += used;
      } else this.#colour(code);
    }
  }

  #colour(code) {
    const [tens, unit] = [Math.floor(code / 10), code % 10];
    const which = { 3: "fg", 9: "fg", 4: "bg", 10: "bg" }[tens];
    if (which === undefined || unit > 9) return;
    if (unit === 9 && tens < 9) this.colours[which] = null;
    else if (unit < 8) this.colours[which] = unit + (tens < 9 ? 0 : 8);
  }
}

/** Return the nearest of 16 colours for the parameters after 38 or 48, and how many those are. */
function readColour([kind, ...values]) {
  if (kind === 5) return [ofPalette(values[0]), 2];
  return kind === 2 ? [nearest(values), 4] : [null, 1];
}

function ofPalette(index) {
  if (!(index >= 0 && index < 256)) return null;
  if (index < 16) return index;
  if (index >= 232) return nearest(Array(3).fill(8 + 10 * (index - 232)));
  const cube = index - 16;
  return nearest([Math.floor(cube / 36), Math.floor(cube / 6) % 6, cube % 6].map((n) => 51 * n));
}

function nearest([red, green, blue]) {
  const high = [red, green, blue].map((value) => value > 110);
  const hue = high[0] + 2 * high[1] + 4 * high[2];
  const most = Math.max(red, green, blue);
  if (hue === 0) return most > 60 ? 8 : 0;
  return most > 200 ? hue + 8 : hue;
}
