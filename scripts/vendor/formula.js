/** The renderer of formulas in TeX; statement.js loads it for statements that have some. */

import katex from "katex";

const OPTIONS = {
  output: "mathml",
  throwOnError: true,
  errorColor: "currentcolor", // of commands that are not trusted, such as \href
  trust: false,
  strict: "ignore",
  maxSize: 20,
  maxExpand: 500,
};

/** Return an element with a formula in MathML. Throws for what is not TeX. */
export function renderFormula(text, isDisplayed) {
  const place = document.createElement("span");
  katex.render(text, place, { ...OPTIONS, displayMode: isDisplayed });
  return place.querySelector("math");
}
