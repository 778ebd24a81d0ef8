/** What is wrong with an input, in words of this page. */

import { say } from "./language.js";

/**
 * Return a sentence about the first constraint that an input does not meet. The title of an input
 * says what its pattern allows.
 */
export function complaintOf(input) {
  const { validity, title, min, max, type, name } = input;
  const label = labelOf(input);
  if (validity.customError) return input.validationMessage;
  if (validity.valueMissing) {
    if (type === "file") return say("Choose a file.");
    if (input.matches("textarea")) return say("Write your solution, or drop a file here.");
    return say("{label} is missing.", { label });
  }
  if (validity.patternMismatch) return say("{label}: {title}.", { label, title });
  const words = max
    ? "{label}: a whole number from {min} to {max}."
    : "{label}: a whole number of at least {min}.";
  return say(words, { label, min, max });
}

/** Return the words of an input's label, without what is only a hint. */
function labelOf(input) {
  return input.labels[0]?.firstElementChild?.firstChild?.textContent.trim() ?? "";
}
