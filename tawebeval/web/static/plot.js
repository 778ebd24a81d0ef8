/** A small plot of one number for each case, as columns of an SVG. */

const MOST_COLUMNS = 120;
const FEW = 24; // columns that would be too wide
const WIDTH = 6; // of a column, with the gap behind it
const HEIGHT = 48;
const SVG = "http://www.w3.org/2000/svg";
const WORSE = ["plain", "good", "partly", "bad"];

/**
 * Return at most `most` columns for cases, each of which has a `tone` and may have the number
 * `member`: the largest `value` and the worst tone of the cases from `first` to `last`, from 1 on.
 */
export function makeColumns(cases, member, most = MOST_COLUMNS) {
  const size = Math.ceil(cases.length / most);
  const columns = [];
  for (let first = 0; first < cases.length; first += size) {
    const last = Math.min(first + size, cases.length);
    let value = 0;
    let worst = 0;
    for (let n = first; n < last; n++) {
      value = Math.max(value, cases[n][member] ?? 0);
      worst = Math.max(worst, WORSE.indexOf(cases[n].tone));
    }
    columns.push({ value, tone: WORSE[worst], first: first + 1, last });
  }
  return columns;
}

/** Draw columns into an `svg` element; `words` returns a value in words. */
export function drawColumns(svg, columns, words) {
  const most = Math.max(...columns.map(({ value }) => value));
  svg.setAttribute("viewBox", `0 0 ${Math.max(FEW, columns.length) * WIDTH} ${HEIGHT}`);
  const bars = columns.map(({ value, tone, first, last }, n) => {
    const height = value > 0 ? Math.max(1, (value / most) * HEIGHT) : 0;
    const bar = svgElement("rect", {
      class: tone,
      x: n * WIDTH,
      y: HEIGHT - height,
      width: WIDTH - 1,
      height,
    });
    const title = svgElement("title", {});
    title.textContent = `${first === last ? first : `${first}–${last}`}: ${words(value)}`;
    bar.append(title);
    return bar;
  });
  svg.replaceChildren(...bars);
}

/** Return a new element of an SVG with these attributes. */
export function svgElement(tag, attributes) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}
